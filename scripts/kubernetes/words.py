"""What a test asks of the kubelet: annotations, since every client of the API can write those."""

PREFIX = "test.elastic-runtime.dev"

NODE_OF = f"{PREFIX}/kubelet"
"""Label of a node: the kubelet that simulates it."""
FAULT = f"{PREFIX}/fault"
"""On a node: `crash` ends all its processes, `frozen` stops them as they are, so that their
connections stay open and nobody answers, `silent` lets them run. The kubelet says nothing, so the
node becomes NotReady. Removed: the node is back, and who was frozen believes that no time passed."""
EXIT = f"{PREFIX}/exit"
"""On a pod: its first container ends with what this JSON says, `{"exitCode": 1}`, with `reason`
and `message` where they matter."""
EVICT = f"{PREFIX}/evict"
"""On a pod: its node evicts it, with this message."""
PREEMPT = f"{PREFIX}/preempt"
"""On a pod: the scheduler deletes it in favour of another."""
SIMULATED = "simulated"
"""An image whose containers are no processes; they run until told otherwise."""
SIMULATE = f"{PREFIX}/simulate"
"""On a pod: its containers are no processes, whatever their image; `true`."""

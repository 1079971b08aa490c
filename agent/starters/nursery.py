"""`python -m elastic.agent.starters.nursery FD`: has torch imported and becomes a store by a fork.

Where ranks are spawned there is no standby; a store that had to import torch as well would take its
processor time from the ranks that do.
"""

import gc
import sys

from setproctitle import setproctitle

from elastic.agent import store
from elastic.agent.starters import fork, preload
from elastic.agent.starters.spec import StartSpec


def main(args: list[str]) -> None:
    """Serve the starter protocol on the descriptor `args[0]`; in a fork, be the store."""
    channel = fork.open_channel(int(args[0]))
    setproctitle("elastic-nursery")
    gc.disable()  # what is imported stays
    try:
        import torch.distributed  # noqa: F401 - what the forks need
    except Exception as error:  # noqa: BLE001 - a script may mend what is missing; stores say more
        fork.give_up(f"torch cannot be imported ahead: {type(error).__name__}: {error}", 1)

    channel.send({"ready": True, "seconds": 0.0, "threads": preload.threads()})
    while (received := fork.receive(channel)) is not None:
        request = fork.start(channel, *received, unfit=_unfit)
        if request is not None:
            store.become(request)


def _unfit(spec: StartSpec) -> str | None:
    return None if spec.kind == "store" else "a nursery starts stores only"


if __name__ == "__main__":
    main(sys.argv[1:])

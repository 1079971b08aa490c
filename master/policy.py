"""What the user asked for, as the state machines see it."""

from dataclasses import dataclass

HANG_ACTIONS = ("recover", "dump", "fail", "ignore")
PRECHECKS = ("off", "quick", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    min_nodes: int = 1
    """A round needs at least this many nodes."""
    max_nodes: int = 1
    """A round takes at most this many; the rest wait as hot spares."""
    node_unit: int = 1
    """A round holds a multiple of this many nodes."""
    sizes: tuple[int, ...] = ()
    """A round holds one of these numbers of nodes; empty: any multiple of the unit."""
    supplied: bool = False
    """A cluster puts new nodes in the place of those that go: the job outlives its last one."""
    rank_unit: int = 1
    """A round holds a multiple of this many ranks; slots may idle for it."""
    last_call: float = 1.0
    """Seconds to wait for more nodes after the last that came, while more may be on their way."""
    preparation: float = 15.0
    """Seconds that a node which came gets to import what ranks need, before others stop for it."""
    agent_restart: float = 3.0
    """Seconds that a guardian gets to bring its agent back before its node is lost."""
    lease: float = 5.0
    """Seconds without a word, and without an answer to a knock, after which a node is lost; where
    most nodes fall silent at once, some times as long (nodes.patient)."""
    settle: float = 1.0
    """Seconds that a symptom of a lost peer waits for its cause to be reported."""
    max_restarts: int = 0
    """Restarts that the script's own errors may cost, as in torchrun."""
    fault_budget: int = 100
    """Restarts that faults of others may cost in a row; it grows back with progress."""
    same_failure_limit: int = 3
    """A failure seen this often with no new step finished in between is deterministic."""
    join_timeout: float | None = None
    """Seconds for the first round to come together before the job fails; None: for ever."""
    below_min_timeout: float | None = None
    """Seconds to wait with fewer nodes than `min_nodes` before the job fails; None: for ever."""
    hang_floor: float = 1.2
    """Seconds without a step below which no round counts as hung, however short its steps are, unless a process is stopped."""
    hang_action: str = "recover"
    """What a hang's verdict does: "recover" restarts the ranks, "dump" only tells, "fail" ends the job, "ignore"
    looks for none."""
    straggler_interval: float = 5.0
    """Seconds, at least, of whose steps ranks' times are compared."""
    precheck: str = "off"
    """How a node is probed before it joins: not at all, for seconds, or for minutes."""
    probe_only: bool = False
    """The job is over once all of its nodes have been tried."""
    exclude_straggler: bool = False
    """A node that is slow by its probes is kept out, and one that is while it trains is drained, where that pays."""
    verdict_age: float = 3600.0
    """Seconds for which what a probe said holds."""
    failure_grace: float = 0.0
    """Seconds between SIGTERM and SIGKILL for the survivors of a failed round."""
    drain_timeout: float = 60.0
    """The same on a drain, a restart by hand and a growing world."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes {self.min_nodes}:{self.max_nodes}: want 1 <= min <= max")
        if self.node_unit < 1 or self.rank_unit < 1:
            raise ValueError("node unit and rank unit: want 1 or more")
        if self.max_nodes // self.node_unit * self.node_unit < self.min_nodes:
            raise ValueError(
                f"no multiple of {self.node_unit} in {self.min_nodes}:{self.max_nodes}"
            )
        if min(self.last_call, self.agent_restart, self.lease, self.settle) < 0:
            raise ValueError("last call, agent restart, lease and settle: want 0 seconds or more")
        if self.hang_action not in HANG_ACTIONS or self.hang_floor <= 0:
            raise ValueError(
                f"hang action: want {', '.join(HANG_ACTIONS)}; hang floor: more than 0 seconds"
            )
        if self.straggler_interval <= 0:
            raise ValueError("straggler interval: want more than 0 seconds")
        if self.precheck not in PRECHECKS or self.verdict_age <= 0:
            raise ValueError(f"precheck: want {', '.join(PRECHECKS)}; verdict age: more than 0 s")
        if min(self.max_restarts, self.fault_budget) < 0 or self.same_failure_limit < 1:
            raise ValueError("restarts and faults: want 0 or more; same failure limit: 1 or more")

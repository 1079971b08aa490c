"""What can happen to a job, and what the master may do about it. All frozen, all plain data."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from elastic.master.policy import Policy

NodeId = NewType("NodeId", str)
"""Lasts as long as the node: its name, or its place on Slurm and Kubernetes."""

Incarnation = NewType("Incarnation", int)
"""One life of a node's agent."""


class NodePhase(StrEnum):
    IDLE = "idle"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class KnockAnswer(StrEnum):
    ALIVE = "alive"
    """The agent answered with the incarnation that the master knows."""
    RESTARTING = "restarting"
    """Another life of the agent answered."""
    GONE = "gone"
    """Refused: neither guardian nor agent is there."""
    SILENT = "silent"
    """No answer: the host or the way to it is gone, or a guardian lives without an agent."""


class Failed(StrEnum):
    """What a failure is the failure of."""

    RANK = "rank"
    STORE = "store"
    """The round's store, which ranks meet at; the rank number tells nothing."""
    START = "start"
    """A rank that its node could not start: no fault of the script's."""
    LOG = "log"
    """A rank that failed while no space was left for its log files, which it writes itself."""
    HANG = "hang"
    """A rank that makes its round stand still."""
    TIMER = "timer"
    """A rank that was ended because it held a timer for longer than it had asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    rank: int
    local_rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    error_type: str = ""
    message: str = ""
    frame: str = ""
    log_tail: str = ""
    oom_killed: bool = False
    what: Failed = Failed.RANK
    kernel_log: tuple[str, ...] = ()
    """Lines of its node's kernel that may say why, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What runs on a node; a level, not an edge."""

    round: int = 0
    phase: NodePhase = NodePhase.IDLE
    failures: tuple[RankFailure, ...] = ()
    ended: tuple[int, ...] = ()
    """Ranks that ended with 0, while others of the node did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    node_id: NodeId
    incarnation: Incarnation
    slots: int
    host: str = ""
    knock_address: str = ""
    role: str = "default"
    labels: tuple[tuple[str, str], ...] = ()
    node_rank: int | None = None
    store: str = ""
    report: Report = Report()


@dataclass(frozen=True, slots=True)
class MasterStarted:
    """The journal was opened; leases start anew."""

    job_uid: str
    launch: str = ""
    """Of the launcher whose master this is: the same for each of its lives."""
    policy: Policy | None = None
    """What holds until the next one, so that a journal is folded as it was written."""
    least_epoch: int = 0
    """Of a job on Kubernetes: beyond the epochs of masters whose journal was lost."""
    least_round: int = 0
    """Likewise, where the journal knows of none: as many rounds may have been, and what they saved is older than what
    comes."""


@dataclass(frozen=True, slots=True)
class Attached:
    nodes: tuple[Attachment, ...]


@dataclass(frozen=True, slots=True)
class Detached:
    """Nodes whose stream ended, or on whose stream nothing came for too long."""

    nodes: tuple[tuple[NodeId, Incarnation], ...]


@dataclass(frozen=True, slots=True)
class Knocked:
    nodes: tuple[tuple[NodeId, Incarnation, KnockAnswer], ...]


@dataclass(frozen=True, slots=True)
class Left:
    """A node says goodbye: a signal, or a drain that is over."""

    node_id: NodeId
    incarnation: Incarnation
    reason: str


@dataclass(frozen=True, slots=True)
class Reported:
    node_id: NodeId
    incarnation: Incarnation
    report: Report


@dataclass(frozen=True, slots=True)
class StoreReady:
    node_id: NodeId
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node that waits has a standby: its ranks will start as fast as those that train."""

    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a node's probe of itself has found."""

    node_id: NodeId
    incarnation: Incarnation
    number: int
    """Which probe it was, of all that the master asked for."""
    level: str
    state: str
    what: str
    seconds: float
    device: str = "cpu"
    """Or cuda."""
    devices: int = 1


@dataclass(frozen=True, slots=True)
class Probed:
    nodes: tuple[Health, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTest:
    """How one test of two nodes went, as one of them tells it."""

    passed: bool
    late: bool = False
    """Not passed: it only waited for the other."""
    what: str = ""
    gather: float = 0.0
    """Seconds of an allgather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What a node has to say of its tests with others."""

    node_id: NodeId
    incarnation: Incarnation
    number: int
    state: str
    """Of its own part: ok, faulty, or unknown, and then nothing was tested."""
    what: str = ""
    gpu: int | None = None
    """On which of its devices that was."""
    matmul: tuple[float, ...] = ()
    """Seconds on each."""
    tests: tuple[PairTest, ...] = ()
    """Of its pairs, in their order."""


@dataclass(frozen=True, slots=True)
class Paired:
    nodes: tuple[Pairing, ...]


@dataclass(frozen=True, slots=True)
class UnitDeclared:
    round: int
    unit: int
    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Progressed:
    """The round has finished a step; `step` is its number where the script tells, else 0."""

    round: int
    step: int
    plain: bool = False
    """The script imports torch in the environment that it was given, so a node that waits can do
    that ahead."""


@dataclass(frozen=True, slots=True)
class Saving:
    """The ranks of the round use a checkpoint, so they can be told at which step to leave."""

    round: int


@dataclass(frozen=True, slots=True)
class Met:
    """All ranks of the round wait in the save of one step, and it is safe."""

    round: int
    step: int
    lost: str = ""
    """Why it is not, and never will be; empty: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A moment of a checkpoint that cannot be loaded from where it is, memory or storage."""

    checkpoint: str
    round: int
    step: int
    from_memory: bool
    what: str
    """In words: file and tensor."""
    later: bool = False
    """In memory and on storage, and all that its round has saved after it."""

    @property
    def where(self) -> tuple[str, int, int, bool, bool]:
        return self.checkpoint, self.round, self.step, self.from_memory, self.later


@dataclass(frozen=True, slots=True)
class Damaged:
    """A rank of the round has found it so, with no good copy anywhere."""

    round: int
    damage: Damage


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """Replicas of a round do not hold the same: what it has saved since they last did may be wrong."""

    round: int
    checkpoint: str
    after: int
    """The last step at which they did."""
    ranks: tuple[int, ...]
    """Those that may be wrong."""
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """The round stands still, and by evidence it will go on doing so."""

    round: int
    ranks: tuple[int, ...]
    """The culprits; empty where none stands apart."""
    nodes: tuple[NodeId, ...]
    """Theirs."""
    place: str
    """Where in the code."""
    reason: str
    machine: bool = False
    """It may be a machine's fault, or that of what is between them."""
    kernel_log: tuple[str, ...] = ()
    """What the kernel of the first of these nodes has just recorded of its hardware."""
    soft: bool = False
    """The evidence may be wrong: a script may do something rare."""
    seconds: float = 0.0
    """That nothing had moved for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """Something holds the round up, by what its ranks have told of their times; or no longer does."""

    round: int
    kind: str
    """rank, node, link, or communication: transfers are slow, and it is not known which link is."""
    ranks: tuple[int, ...]
    """That are slow; none of a link."""
    nodes: tuple[NodeId, ...]
    share: float
    """Of the job's time, that it costs."""
    pays: bool
    """Whether it is worth a restart."""
    reason: str
    over: bool = False

    @property
    def about(self) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
        return self.kind, self.ranks, self.nodes


@dataclass(frozen=True, slots=True)
class RestartAsked:
    reason: str
    back: tuple[tuple[str, int, int], ...] = ()
    """Checkpoints to go back to: the name, and the round and the step of the moment."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Of one node, or of the whole job when `node_id` is None."""

    node_id: NodeId | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A machine that the cluster knows to be gone, with all that ran there."""

    node_id: NodeId
    cause: str
    """A `Cause`: who pays for it."""
    reason: str
    exit_code: int | None = None
    """Of its container, where that is known."""
    out_of_memory: bool = False
    """There is a record that its container was ended for want of memory."""


@dataclass(frozen=True, slots=True)
class Removed:
    nodes: tuple[Removal, ...]


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nodes that are to leave, all in one change, each with the reason."""

    nodes: tuple[tuple[NodeId, str], ...]
    why: str = ""
    """A `Why`, where they are not simply asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """Another range of nodes from now on."""

    min_nodes: int
    max_nodes: int
    node_unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FailAsked:
    """The cluster cannot give what the job needs, or what runs there must not go on."""

    cause: str
    """A `Cause` or a `Why`."""
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """The master was told to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """The master itself stood still: what was said to it meanwhile is still to be read."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time went by."""


@dataclass(frozen=True, slots=True)
class Together:
    """What came in one moment: all of it is taken in, and then it is decided once."""

    events: "tuple[Attached | Detached | Knocked | Probed | Paired, ...]"


Event = (
    MasterStarted
    | Attached
    | Detached
    | Knocked
    | Left
    | Reported
    | StoreReady
    | Prepared
    | Probed
    | Paired
    | UnitDeclared
    | Progressed
    | Saving
    | Met
    | Damaged
    | Doubted
    | Hung
    | Straggling
    | RestartAsked
    | DrainAsked
    | Removed
    | Withdrawn
    | Resized
    | FailAsked
    | Stopping
    | Stalled
    | Tick
    | Together
)


@dataclass(frozen=True, slots=True)
class Knock:
    """Find out whether a node that fell silent is dead."""

    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class WakeAt:
    time: float


@dataclass(frozen=True, slots=True)
class Tell:
    """The directives of these nodes may have changed; None: of all."""

    node_ids: frozenset[NodeId] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is over; `exit_code` is every launcher's."""

    exit_code: int
    reason: str


Effect = Knock | WakeAt | Tell | Finished

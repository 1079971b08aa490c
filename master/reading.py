"""What one rank's end says, looked at alone: a label, and how much that says of the cause. Pure."""

import functools
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from elastic.master import symptoms
from elastic.master.events import Failed, NodeId, RankFailure
from elastic.master.symptoms import Found
from elastic.proto import signals
from elastic.proto.lost_workers import lost_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A failure with its place and time."""

    node_id: NodeId
    failure: RankFailure
    at: float


class Weight(IntEnum):
    """How much a rank's end says of the cause; the heaviest is where it began."""

    CLOSED = 0
    """A peer is gone."""
    TIMED_OUT = 1
    """A peer did not come: this rank left by itself, and so may be why others see it gone."""
    WAITED = 2
    """It says what it could not reach, or waited for in vain."""
    ABORTED = 3
    """SIGABRT with no word: libraries end a process so too when a peer is lost."""
    KILLED = 4
    """A signal from outside, which may have come because of another's failure."""
    CAUSE = 5


@dataclass(frozen=True, slots=True)
class Reading:
    """What one rank's end says, looked at alone."""

    observed: Observed
    label: str
    weight: Weight
    line: str
    """Of its texts; empty: there is none."""

    @property
    def order(self) -> tuple[int, float, int]:
        """Where it began sorts first: a signal from outside is a cause too unless one came before."""
        weight = Weight.CAUSE if self.weight is Weight.KILLED else self.weight
        return -weight, self.observed.at, self.observed.failure.rank


def read(observed: Observed) -> Reading:
    """What one rank's end says, looked at alone."""
    label, weight, line = _say(observed.failure)
    return Reading(observed, label, weight, line or describe(observed))


def ends(failure: RankFailure) -> tuple[str, Weight]:
    """The label of one rank's end, and how much it says of the cause."""
    texts = (failure.message, failure.log_tail)
    message, log_tail = (_NUMBERS.sub("0", text) for text in texts)
    return _ends(replace(failure, rank=0, local_rank=0, message=message, log_tail=log_tail))


_NUMBERS = re.compile(r"\d+(?:[.:]\d+)+|\d{4,}|(?<=rank)\d+|(?<=[Rr]ank )\d+")
"""Addresses, ports, times, ranks: without them, thousands that lost the same peer say the same. Numbers
of errors are shorter."""


@functools.lru_cache(maxsize=1024)
def _ends(failure: RankFailure) -> tuple[str, Weight]:
    label, weight, _ = _say(failure)
    return label, weight


def root_of(observed: Sequence[Observed]) -> Observed:
    """The one with which it began, by what each says; of those that only follow, the first heard."""
    readings = (Reading(o, *ends(o.failure), "") for o in observed)
    root = min(readings, key=lambda reading: reading.order)
    return root.observed if root.weight > Weight.WAITED else observed[0]


Said = tuple[str, Weight, str]


def _say(failure: RankFailure) -> Said:
    return _of_kind(failure) or _of_texts(failure) or _of_signal(failure)


def _of_kind(failure: RankFailure) -> Said | None:
    if failure.what is Failed.STORE:
        return "cgroup_oom" if failure.oom_killed else "store_lost", Weight.CAUSE, ""
    if failure.what is Failed.HANG:
        return "peer_hung", Weight.CAUSE, ""
    if failure.what is Failed.TIMER:
        return "timeout", Weight.CAUSE, ""
    if failure.what is Failed.LOG:
        return "disk_full", Weight.CAUSE, ""
    if failure.what is Failed.START:
        found = symptoms.first(symptoms.CAUSES, symptoms.gist(failure.message))
        if found is None or found.label in ("permission_denied", "file_missing"):
            return "start_failed", Weight.CAUSE, ""
        return found.label, Weight.CAUSE, found.line
    if found := _of_kernel(failure):
        return found.label, Weight.CAUSE, found.line
    if failure.oom_killed:
        return "cgroup_oom", Weight.CAUSE, ""
    return None


def ended_early(ranks: Sequence[int]) -> str:
    """In words: they had ended, with 0, while others went on."""
    who = (
        f"rank {ranks[0]}"
        if len(ranks) == 1
        else f"{len(ranks)} ranks, {ranks[0]} the first of them,"
    )
    return f"{who} had ended, with 0, while others went on"


def of_machine(failure: RankFailure) -> bool:
    """Its node's kernel says that the machine is at fault: a device, or memory of the host."""
    found = _of_kernel(failure)
    return found is not None and found.label not in ("cgroup_oom", "host_oom")


def _of_kernel(failure: RankFailure) -> Found | None:
    """What its node's kernel recorded, which outranks what a process says."""
    lines = failure.kernel_log
    oom = symptoms.first_line(symptoms.KERNEL_OOM, lines) if _was_killed(failure) else None
    return oom or of_hardware(lines)


def _was_killed(failure: RankFailure) -> bool:
    """By a SIGKILL, or a worker of its loader."""
    return signal_of(failure) == signal.SIGKILL or bool(lost_workers(failure.message))


def of_hardware(lines: Sequence[str]) -> Found | None:
    """What a kernel recorded of it."""
    found = symptoms.first_xid(symptoms.XIDS, lines)
    return found or symptoms.first_line(symptoms.KERNEL_HARDWARE, lines)


def _of_texts(failure: RankFailure) -> Said | None:
    kind = failure.error_type.rpartition(".")[2]
    tail = symptoms.gist(failure.log_tail)
    if not kind:
        return _of_tail(failure, symptoms.gist(failure.message), tail)
    said = symptoms.gist(f"{kind}: {failure.message}")
    if found := _of_exception(kind, said, tail, failure.log_tail):
        waits = found.label == "timeout" and kind.startswith("Dist")
        return found.label, Weight.WAITED if waits else Weight.CAUSE, found.line
    if peer := _of_peer(said, tail):
        return peer
    before = symptoms.raised(_last_chain(tail))
    if peer := _of_peer(before, tail):
        return peer
    found = symptoms.first(symptoms.CAUSES, before) if _CHAINED.search(tail) else None
    if found is None and (kind in _VAGUE or kind.startswith("Dist")):
        found = symptoms.first((*symptoms.DEVICE, *symptoms.SHARED_MEMORY), tail)
    if found:
        return found.label, Weight.CAUSE, found.line
    return "script_error", Weight.CAUSE, said.splitlines()[0]


def _last_chain(log: str) -> str:
    """From the first of those tracebacks on that the last one names as its causes; what was raised before was caught."""
    starts = [found.start() for found in _TRACEBACK.finditer(log)]
    while len(starts) > 1 and _CHAINED.search(log, starts[-2], starts[-1]):
        starts.pop()
    return log[starts[-1] :] if starts else log


_TRACEBACK = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
_CHAINED = re.compile("direct cause of the following|handling of the above exception")
_VAGUE = ("RuntimeError", "AcceleratorError", "Exception")
"""What libraries in C++ raise: the log before it may say more."""


def _of_exception(kind: str, said: str, tail: str, log: str) -> Found | None:
    """What an exception's own words name, made exact by the log before it."""
    if kind == "KeyError" and _ENVIRONMENT.search(log):
        return Found("config_error", said.splitlines()[0])
    found = symptoms.first(symptoms.CAUSES, said)
    label = found.label if found else ""
    if label == "timeout" and not _OWN_WAIT.search(said) and _of_peer(said, ""):
        return None
    if label == "dataloader_worker_died":
        return symptoms.first(symptoms.SHARED_MEMORY, tail) or found
    if label == "device_error":
        return symptoms.first(symptoms.DEVICE, tail) or found
    if label == "data_error" and _CONFIG_FILE.search(log):
        return Found("config_error", said.splitlines()[0])
    if (label == "data_error" or kind == "EOFError") and _CHECKPOINT.search(log):
        return Found("checkpoint_damaged", said.splitlines()[0])
    return found


_ENVIRONMENT = re.compile(r"""File "(?:<frozen os>|\S*/os\.py)", line \d+, in __getitem__""")
_CHECKPOINT = re.compile(
    r"torch/serialization\.py|_weights_only_unpickler|torch/distributed/checkpoint/|safetensors/"
)
_CONFIG_FILE = re.compile(r"\b(?:config|settings)\w*\.(?:json|ya?ml|toml|ini)\b")
_OWN_WAIT = re.compile(r"^(?:DistStoreError: )?wait timeout after", re.MULTILINE)


def _of_tail(failure: RankFailure, message: str, tail: str) -> Said | None:
    """Of a process that raised nothing: it left by an exit code or by a signal."""
    text = f"{message}\n{tail}"
    number = signal_of(failure)
    if failure.exit_code in (126, 127) and "cannot start" in text:
        return "start_failed", Weight.CAUSE, symptoms.line_at(text, text.find("cannot start"))
    loud = (*symptoms.DEVICE, *symptoms.SHARED_MEMORY, *symptoms.MISMATCH)
    if number in (0, signal.SIGABRT, *_FAULTS) and (found := symptoms.first(loud, text)):
        return found.label, Weight.CAUSE, found.line
    if number in (0, signal.SIGABRT) and (peer := _of_peer(text, "")):
        return peer
    rules = symptoms.CAUSES
    if number:
        wanted = _OF_SIGNALS
        rules = tuple(rule for rule in rules if rule.label in wanted)
    found = symptoms.first(rules, text)
    if found and number in (0, *_OF_SIGNALS.get(found.label, ())):
        return found.label, Weight.CAUSE, found.line
    if number:
        return None
    last = next((x.strip() for x in reversed(text.splitlines()) if x.strip()), "")
    return "script_error", Weight.CAUSE, last[:300]


def _is_peers(said: str) -> bool:
    return bool(symptoms.PEER_TIMED_OUT.search(said) or symptoms.PEER_CLOSED.search(said))


def _of_peer(said: str, tail: str) -> Said | None:
    """What it says of a peer; its log may say why that could not be reached."""
    found = symptoms.first(symptoms.NETWORK, said)
    late = symptoms.PEER_TIMED_OUT.search(said)
    gone = symptoms.PEER_CLOSED.search(said)
    if not (found or late or gone):
        return None
    if found := found or symptoms.first(symptoms.NETWORK, tail):
        return "network", Weight.WAITED, found.line
    match = late or gone
    assert match is not None
    barrier = "successfully reached monitoredBarrier" in said  # rank 0 left it, and knows why
    weight = Weight.TIMED_OUT if late and not barrier else Weight.CLOSED
    return "peer_hung" if late else "network", weight, symptoms.line_at(said, match.start())


_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_BY_SIGNAL: Mapping[int, tuple[str, Weight]] = {
    **dict.fromkeys((*_FAULTS, signal.SIGTRAP, signal.SIGSYS), ("crash", Weight.CAUSE)),
    signal.SIGABRT: ("crash", Weight.ABORTED),
    **dict.fromkeys((signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF), ("timeout", Weight.CAUSE)),
    **dict.fromkeys((signal.SIGXCPU, signal.SIGXFSZ), ("limit_reached", Weight.CAUSE)),
    signal.SIGINT: ("interrupted", Weight.KILLED),
}
_OF_SIGNALS: Mapping[str, tuple[int, ...]] = {
    "preempted": (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT, signal.SIGUSR1),
    "cgroup_oom": (signal.SIGKILL,),
    "memory_refused": (signal.SIGABRT,),
    "interrupted": (signal.SIGINT,),
}


def _of_signal(failure: RankFailure) -> Said:
    label, weight = _BY_SIGNAL.get(signal_of(failure), ("killed", Weight.KILLED))
    if weight is Weight.ABORTED and failure.log_tail.strip():
        weight = Weight.CAUSE  # it says what it died of, and that is no peer
    return label, weight, ""


def signal_of(failure: RankFailure) -> int:
    """That ended it, or that it says so of a child as shells do; 0: none."""
    code = failure.exit_code
    if code < 0:
        return -code
    return code - 128 if not failure.error_type and 128 < code <= 128 + 31 else 0


def describe(observed: Observed) -> str:
    """One line: which rank, where, how it ended."""
    failure = observed.failure
    if failure.what is Failed.STORE:
        how = "was killed by the kernel, out of memory" if failure.oom_killed else "died"
        return f"the store on {observed.node_id} {how}"
    where = f"rank {failure.rank} on {observed.node_id}"
    if failure.oom_killed and not failure.error_type:
        return f"{where} was killed by the kernel, out of memory"
    said = next(iter(failure.message.strip().splitlines()), "")[:200]
    if failure.what is Failed.START:
        return f"{where} could not be started: {said}"
    if failure.what is Failed.LOG:
        return f"{where} failed with no space left for its logs in {said}"
    kind = " ".join(failure.error_type.split())
    if kind:
        return f"{where} raised {kind}" + (f": {said}" if said else "")
    if failure.exit_code < 0:
        ended = f"{where} was ended by {signals.name(-failure.exit_code)}"
    else:
        ended = f"{where} exited with {failure.exit_code}"
    return ended + (f": {said}" if said else "")

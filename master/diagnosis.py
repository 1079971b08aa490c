"""One verdict a failure, with its evidence: what happened, and where it began. Pure.

Of all who report, the culprit is told by symptom against cause, never by who reports first. What
the kernel recorded outranks what processes say; a cause of its own (an exception, a crash) outranks
a signal from outside; and what is said of a peer that is gone or late says nothing of who says it.
Where nobody names a cause, it began where nothing was heard, or with who stands apart.
"""

import re
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from elastic.master import symptoms
from elastic.master.events import Failed, NodeId
from elastic.master.reading import Observed, Reading, Weight, describe, ended_early, read
from elastic.master.symptoms import Found

CERTAIN, LIKELY, GUESS = "certain", "likely", "a guess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What a node can tell besides its ranks' ends."""

    kernel_log: tuple[str, ...] = ()
    """Lines since the round began."""
    container_exit: int | None = None
    """None: it has one no more, or that is not known."""
    container_oom: bool = False
    """There is a record that it was ended for want of memory."""
    ended: tuple[int, ...] = ()
    """Ranks that had ended with 0, while others went on; all of them, where nothing failed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    label: str
    """One of `symptoms.ACTIONS`."""
    node_id: NodeId | None
    """Where it began; None: on no node, or nobody can tell."""
    rank: int | None
    """None: the node as a whole, its store or its container."""
    evidence: tuple[str, ...]
    """Lines, the most telling first."""
    confidence: str
    """CERTAIN: the kernel or the only text that names a cause says so. LIKELY. GUESS: nothing does."""
    root: Observed | None = None
    """The culprit's own report, where it made one."""


def diagnose(failures: Sequence[Observed], hosts: Mapping[NodeId, Host]) -> Diagnosis:
    """The verdict on one failure of a round.

    failures: all that was reported of it, in any order; hosts: the round's nodes, in the order of
    their ranks, those from which nothing came too. Raises ValueError if both say nothing.
    """
    readings = sorted((read(o) for o in failures), key=lambda r: r.order)
    if verdict := _by_kernel(readings, hosts) or _by_container(readings, hosts):
        return verdict
    if not readings:
        raise ValueError("there is no failure to diagnose")
    if verdict := _by_mismatch(readings):
        return verdict
    if readings[0].weight <= Weight.WAITED:
        return _by_absence(readings, hosts)
    return _of_rank(readings, hosts)


# --- what nodes recorded -------------------------------------------------------------------------


def _by_kernel(readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> Diagnosis | None:
    """What the kernel of a node recorded, if it is a cause."""
    for node_id, host in hosts.items():
        found = symptoms.first_line(symptoms.KERNEL_OOM, host.kernel_log)
        found = found or symptoms.first_xid(symptoms.XIDS, host.kernel_log)
        found = found or symptoms.first_line(symptoms.KERNEL_HARDWARE, host.kernel_log)
        if found:
            return _on_node(readings, hosts, node_id, found, CERTAIN)
    own = readings[0] if readings else None
    for node_id, host in hosts.items():
        vague = own is None or own.weight < Weight.ABORTED
        here = own is not None and own.observed.node_id == node_id
        if here or vague:
            label = own.label if own else ""
            found = None
            if vague or label in ("device_error", "crash"):
                found = symptoms.first_xid(symptoms.XIDS_OF_PROGRAMS, host.kernel_log)
            if found is None and (vague or label in ("crash", "killed")):
                found = symptoms.first_line(symptoms.KERNEL_MACHINE, host.kernel_log)
            if found is None and (vague or label in ("storage_error", "crash", "data_error")):
                found = symptoms.first_line(symptoms.KERNEL_STORAGE, host.kernel_log)
            if found:
                return _on_node(readings, hosts, node_id, found, CERTAIN)
            if vague and (found := symptoms.first_line(symptoms.KERNEL_NETWORK, host.kernel_log)):
                evidence = _evidence(found.line, readings)
                return _verdict(found.label, node_id, None, evidence, LIKELY)
    return None


def _on_node(
    readings: Sequence[Reading],
    hosts: Mapping[NodeId, Host],
    node_id: NodeId,
    found: Found,
    confidence: str,
) -> Diagnosis:
    """The kernel of that node said so: of its ranks, the one that it struck."""
    here = [r for r in readings if r.observed.node_id == node_id]
    struck = [r for r in here if r.weight >= Weight.ABORTED]
    if found.label in ("cgroup_oom", "host_oom"):
        killed = [r for r in here if r.observed.failure.exit_code in (-signal.SIGKILL, 137)]
        struck = killed or struck
    evidence = _evidence(found.line, struck or readings)
    many = found.label == "nvlink_error" and len({r.observed.at for r in struck}) < len(struck)
    if struck and not many:
        return _verdict(found.label, node_id, struck[0], evidence, confidence)
    verdict = _verdict(found.label, node_id, None, evidence, confidence)
    if struck or not here:
        return verdict
    missing = (rank for node, rank in _missing(readings, hosts) if node == node_id)
    return replace(verdict, rank=next(missing, None))


def _by_container(readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> Diagnosis | None:
    """A container that ended by a code of its runtime's, with no word from its ranks."""
    for node_id, host in hosts.items():
        code = host.container_exit
        if code in (None, 0) or any(
            r.observed.node_id == node_id and r.weight >= Weight.ABORTED
            for r in readings
            if r.observed.failure.what is not Failed.START
        ):
            continue
        assert code is not None
        told = next((r for r in readings if r.observed.node_id == node_id), None)
        label = _CONTAINER.get(code, "crash" if code > 128 else "script_error")
        if host.container_oom:
            label = "cgroup_oom"
        elif told and told.label not in ("start_failed", "network", "peer_hung"):
            label = told.label
        record = ", ended for want of memory" if host.container_oom else ""
        line = f"the container of {node_id} exited with {code}{record}"
        evidence = _evidence(line, [told] if told else readings)
        return _verdict(label, node_id, None, evidence, LIKELY)
    return None


_CONTAINER = {
    125: "start_failed",
    126: "start_failed",
    127: "start_failed",
    128: "no_device",
    130: "interrupted",
    137: "killed",
    143: "preempted",
}
"""128: the device or its driver was not there when the container began. 137: SIGKILL, with no record
of the kernel's. 143: SIGTERM, as a scheduler ends a container that it wants away."""
CONTAINER_CODES = frozenset({*_CONTAINER, 134, 135, 136, 139})
"""Of the runtime and the kernel; a launcher that lives to give its own code has told why by itself."""


# --- several ranks -------------------------------------------------------------------------------


def _of_rank(readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> Diagnosis:
    """The heaviest of the readings names its cause itself."""
    top = readings[0]
    others = [r for r in readings if r.weight == top.weight and r.label != top.label]
    confidence = LIKELY if others or top.weight < Weight.CAUSE else CERTAIN
    node_id: NodeId | None = top.observed.node_id
    whole = top.label in ("store_lost", "preempted")
    failure = top.observed.failure
    container = failure.what is Failed.START and top.label != "start_failed"
    if top.label == "nvlink_error":
        same = [r for r in readings if r.label == top.label and r.observed.at == top.observed.at]
        whole = len(same) > 1
    if top.label == "config_error" and not failure.error_type:
        node_id = None  # the command line is every rank's
    evidence = _evidence(top.line, readings)
    at = None if whole or container or node_id is None else top
    verdict = _verdict(top.label, node_id, at, evidence, confidence)
    return replace(verdict, root=top.observed)


def _by_mismatch(readings: Sequence[Reading]) -> Diagnosis | None:
    """Ranks that called different collectives: the one that stands apart from the others."""
    said = [r for r in readings if r.label == "collective_mismatch"]
    causes = [r for r in readings if r.weight is Weight.CAUSE and r not in said]
    if said and (not causes or said[0].order < causes[0].order):
        odd = _odd([(r, _fingerprint(r)) for r in said]) if len(said) > 1 else None
        if len(said) == 1 and "preamble" in said[0].line:
            odd = _odd([(r, _frame(r)) for r in readings if r not in said]) or _sender(
                said[0], readings
            )
        evidence = _evidence(said[0].line, readings)
        node_id = odd.observed.node_id if odd else None
        return _verdict("collective_mismatch", node_id, odd, evidence, CERTAIN if odd else LIKELY)
    late = [r for r in readings if r.weight is Weight.TIMED_OUT]
    if causes or len(late) < 2 or _gaps(readings):
        return None
    odd = _odd([(r, _place(r)) for r in late])
    if odd is None:
        return None
    what = f"rank {odd.observed.failure.rank} waits in {_place(odd)}, others elsewhere"
    evidence = (what, *_evidence(odd.line, readings))[:3]
    return _verdict("collective_mismatch", odd.observed.node_id, odd, evidence, LIKELY)


def _odd(told: Sequence[tuple[Reading, str]]) -> Reading | None:
    """The one that differs from what most say; None: none, or nobody can tell."""
    counts = Counter(place for _, place in told if place)
    if len(counts) < 2:
        return None
    (_, most), (_, next_) = counts.most_common(2)
    if most == next_:
        return None
    usual = counts.most_common(1)[0][0]
    return next(reading for reading, place in told if place not in ("", usual))


_COLLECTIVE = re.compile(r"distributed_c10d\.py\", line \d+, in (\w+)")
_WORK = re.compile(r"OpType=(\w+), NumelIn=(\d+), NumelOut=(\d+)")
_PRINT = re.compile(
    r"is running collective: CollectiveFingerPrint\(SequenceNumber=(\d+),? *OpType=(\w+)"
    r"(?:,? *TensorShape=\[([^\]]*)\])?(?:,? *TensorDtypes=(\w+))?"
)


def _fingerprint(reading: Reading) -> str:
    failure = reading.observed.failure
    match = _PRINT.search(failure.message) or _PRINT.search(failure.log_tail)
    return " ".join(filter(None, match.groups())) if match else ""


def _frame(reading: Reading) -> str:
    return reading.observed.failure.frame


def _place(reading: Reading) -> str:
    """Where it waited: the collective, as far as its texts tell, and the script's own frame."""
    failure = reading.observed.failure
    work = _WORK.search(failure.log_tail)
    if work:
        return " ".join(work.groups())
    calls = _COLLECTIVE.findall(failure.log_tail)
    return f"{calls[-1] if calls else ''} {failure.frame}".strip()


def _sender(aborted: Reading, readings: Sequence[Reading]) -> Reading | None:
    """Who sent what did not fit: in Gloo's ring a rank receives from the one after it."""
    ranks = {r.observed.failure.rank: r for r in readings}
    number = (aborted.observed.failure.rank + 1) % (max(ranks) + 1)
    return ranks.get(number) if number in ranks else None


# --- nobody names a cause ------------------------------------------------------------------------


_ABSENT = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_ENQUEUED = re.compile(r"(?:last enqueued NCCL work: |SeqNum=)(\d+)")


def _by_absence(readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> Diagnosis:
    """All tell of others: it began where nothing was heard, or between them; or with who was done before them."""
    if verdict := _by_ends(readings, hosts):
        return verdict
    waited = [r for r in readings if r.weight is Weight.WAITED]
    late = [r for r in readings if r.weight is Weight.TIMED_OUT]
    if waited:
        top = waited[0]
        own = top if top.label != "network" else None
        node_id = own.observed.node_id if own else None
        return _verdict(top.label, node_id, own, _evidence(top.line, readings), LIKELY)
    if late:
        return _of_late(late, readings, hosts)
    silent = _silent(readings, hosts)
    evidence = _evidence(readings[0].line, readings)
    if silent and any(_IN_COLLECTIVE.search(r.line) for r in readings):
        line = f"nothing was heard from {silent[0]}"
        return _verdict("node_lost", silent[0], None, (line, *evidence)[:3], LIKELY)
    return _verdict("network", None, None, evidence, GUESS)


def _by_ends(readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> Diagnosis | None:
    """Ranks that had ended, with 0, while others went on."""
    for node_id, host in hosts.items():
        if host.ended:
            evidence = _evidence(ended_early(host.ended), readings)
            verdict = _verdict("script_error", node_id, None, evidence, LIKELY)
            return replace(verdict, rank=host.ended[0])
    return None


_IN_COLLECTIVE = re.compile(r"gloo|remote (?:process|peer|worker)|ncclRemoteError|pair closure")
"""The group had been made, so its members had reached one another."""


def _of_late(
    late: Sequence[Reading], readings: Sequence[Reading], hosts: Mapping[NodeId, Host]
) -> Diagnosis:
    """Some waited for a peer in vain: for which?"""
    evidence = _evidence(late[0].line, readings)
    for reading in late:
        if match := _ABSENT.search(reading.line):
            rank = int(re.findall(r"\d+", match[1])[0])
            node_id = _node_of(rank, readings, hosts)
            verdict = _verdict("peer_hung", node_id, None, evidence, CERTAIN)
            return replace(verdict, rank=rank)
    if missing := next(_missing(readings, hosts), None):
        node_id, rank = missing
        evidence = (f"rank {rank} said nothing", *evidence)[:3]
        return replace(_verdict("peer_hung", node_id, None, evidence, LIKELY), rank=rank)
    done = {r: _sequence(r) for r in late}
    known = {number for number in done.values() if number >= 0}
    if len(known) > 1:
        behind = min((r for r in late if done[r] >= 0), key=lambda r: done[r])
        return _verdict("peer_hung", behind.observed.node_id, behind, evidence, LIKELY)
    nodes = {r.observed.node_id for r in readings}
    label = "peer_hung" if known or len(nodes) == 1 else "network"
    return _verdict(label, None, None, evidence, GUESS)


def _sequence(reading: Reading) -> int:
    failure = reading.observed.failure
    found = _ENQUEUED.search(failure.log_tail) or _ENQUEUED.search(failure.message)
    return int(found[1][:18]) if found else -1


def _gaps(readings: Sequence[Reading]) -> list[int]:
    """Ranks below the highest heard of that said nothing; nonsense has none."""
    seen = {r.observed.failure.rank for r in readings}
    top = max(seen, default=0)
    return [r for r in range(top) if r not in seen] if top < 1 << 20 else []


def _silent(readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> list[NodeId]:
    heard = {r.observed.node_id for r in readings}
    return [node_id for node_id in hosts if node_id not in heard]


def _missing(
    readings: Sequence[Reading], hosts: Mapping[NodeId, Host]
) -> Iterator[tuple[NodeId, int]]:
    """Ranks of the round that said nothing, as far as one can tell without knowing its size."""
    gaps = _gaps(readings)
    if not gaps and readings and (_silent(readings, hosts) or len(readings) == 1):
        gaps = [max(r.observed.failure.rank for r in readings) + 1]
    for rank in gaps:  # of thousands of ranks on thousands of nodes the first will do
        if (node_id := _node_of(rank, readings, hosts)) is not None:
            yield node_id, rank


def _node_of(rank: int, readings: Sequence[Reading], hosts: Mapping[NodeId, Host]) -> NodeId | None:
    """The node of a rank that said nothing: one that is silent, or that whose ranks are around it."""
    last: dict[NodeId, int] = {}
    begins: dict[NodeId, int] = {}
    for r in readings:
        node_id, failure = r.observed.node_id, r.observed.failure
        begins[node_id] = failure.rank - failure.local_rank
        last[node_id] = max(failure.rank, last.get(node_id, 0))
    found: NodeId | None = None
    for node_id in chain(hosts, (n for n in begins if n not in hosts)):
        if node_id not in begins:
            if found is None or rank > last.get(found, -1):
                found = node_id
        elif begins[node_id] <= rank and (
            found is None or found in begins or rank >= begins[node_id]
        ):
            found = node_id
    return found


# --- words ---------------------------------------------------------------------------------------


def _verdict(
    label: str,
    node_id: NodeId | None,
    at: Reading | None,
    evidence: tuple[str, ...],
    confidence: str,
) -> Diagnosis:
    return Diagnosis(
        label=label,
        node_id=node_id,
        rank=at.observed.failure.rank if at else None,
        evidence=evidence,
        confidence=confidence,
        root=at.observed if at else None,
    )


def _evidence(line: str, readings: Sequence[Reading]) -> tuple[str, ...]:
    """The line itself, then how the first of the readings ended; three at most."""
    ends = [describe(r.observed) for r in readings[:2]]
    found = [" ".join(text.split())[:300] for text in (line, *ends)]
    return tuple(dict.fromkeys(text for text in found if text))[:3]

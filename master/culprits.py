"""Who makes a round hang: from two looks or more at each of its ranks. Pure.

Hard evidence is a process that is stopped, a rank or a worker of its loader, or ranks that all wait, one of them in
another collective than the others. Soft evidence is a rank that stands apart and does not move while the others wait in a collective. What
may take long for a reason (compiling, a checkpoint, an evaluation, data that come late, anything that sleeps)
gets `LONG`. And a verdict by soft evidence may be wrong, for a script may do something rare: the next one at the same
place takes `PATIENT_AFTER` times as long as that did.

A round without a step, as of a script that has no optimizer, has no rhythm, and a rank of it may compute or sleep
for as long as it likes: only what no script does by itself is evidence there, and it is given long.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from elastic.master.activity import Activity, Doing, OnDevice, is_native, moved, worked
from elastic.master.circles import Waits, circles
from elastic.master.events import NodeId
from elastic.master.tree import Call, bare, merge, odd, ranges, render
from elastic.proto import collectives
from elastic.proto.phases import LEAVING, PERSISTING

LONG, LONG_PATIENCES = 60.0, 20
"""Seconds, and patiences, that a round may stand still for a reason; the larger of them."""
MOST_PLACES = 3
"""Of culprits that a verdict names."""
MOST_OWED = 3
"""Sends and receives that a verdict names."""
UNSTEPPED_PATIENCES = 10
"""The same of a round without a step, whose patience is a minute."""
FOREVER = 600.0
"""Seconds that a model may compute by itself: its layers all look alike, whether it goes on or not."""
KNOWN = 3
"""Times as long as so far a phase may take that the script names."""

ENOUGH = 3
"""Looks that tell that a rank works in Python alone."""
PATIENT = frozenset({Activity.COMPILE, Activity.CHECKPOINT, Activity.DATA})
SLEEPING = frozenset({Activity.SLEEP, Activity.LOCK, Activity.FILE, Activity.WAIT})
"""Waits for something that is none of the ranks: a disk, a network, another process."""
STARVED = 0.5
"""Of the time: a rank that waits for a processor for more of it is held up by whoever has that."""
SPAN = 0.3
"""Of the patience: from the first look at a rank to the last."""
RARE = re.compile(
    r"_*(eval|valid|test|predict|generat|infer|save|checkpoint|upload|download)", re.IGNORECASE
)
"""Beginnings of functions' names of a script that does something besides training."""
MODULE = "/torch/nn/modules/module.py"
"""Calls a model and each of its layers."""
NONE_ENDED: Mapping[int, NodeId] = MappingProxyType({})
PATIENT_AFTER = 4
SILENT = frozenset({Activity.WAIT, Activity.BACKWARD, Activity.OPTIMIZER})
"""May wait for others in a library's code, of which no stack tells, asleep."""
LIBRARY = frozenset({Activity.BACKWARD, Activity.OPTIMIZER})
"""Of these, those in whose own code a rank sleeps for others alone: it waits also where it does not say for what."""
SPINS = frozenset({Activity.DEVICE, Activity.NATIVE})
"""The same, of a device, which the processor may wait for awake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The last that a rank has issued in one process group; on a device the first that is not over."""

    group: str
    seq: int
    op: str
    sizes: str
    p2p: bool = False
    """A send or a receive; other ranks count theirs otherwise."""
    device: bool = False
    """On which it runs; its host may do other things meanwhile."""
    started: bool = False
    """On the device, where that is known."""
    done: bool
    before: str = ""
    """What its group had before it, as `kind` tells that; empty where it is not known."""

    @property
    def known(self) -> bool:
        """Else it is one of a device's that its rank does not remember."""
        return bool(self.op)

    @property
    def kind(self) -> str:
        return collectives.kind(self.op, self.sizes)

    def __str__(self) -> str:
        if not self.known:
            return "a collective"
        return f"{self.op.rpartition(':')[2]} #{self.seq} of {self.sizes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank in one look."""

    rank: int
    node: NodeId
    state: str
    """Of its main thread, as /proc has it: R, S, D, T, Z; empty: gone."""
    doing: Doing
    stack: tuple[Call, ...] = ()
    """Innermost first."""
    collectives: tuple[Collective, ...] | None = None
    """None: it did not answer what they are."""
    at: float = 0.0
    """When it was told, in job time."""
    sure: bool = True
    """It is known whether its main thread holds the GIL, or runs in a library without it."""
    free: bool = False
    """Its main thread is known not to hold the GIL, and is in a library's code."""
    ticks: int = 0
    cpu: float = 0.0
    """Seconds of it that its main thread used."""
    run_delay: float | None = None
    """Seconds that its main thread waited for it, in all its life; None: not known."""
    taken: float = 0.0
    """When it was taken, by its node's clock."""
    on_device: OnDevice = OnDevice.UNKNOWN
    transfers: Mapping[int, tuple[int, int]] | None = None
    """By rank, how often it has sent to it, and asked to receive from it; None: it did not answer, or does not know."""
    kernel: tuple[str, ...] = ()
    """Of a rank in state D: the kernel's functions, innermost first."""

    @property
    def pending(self) -> tuple[Collective, ...]:
        """What it has issued, and what is not known to be over."""
        return tuple(one for one in self.collectives or () if not one.done)

    @property
    def waits(self) -> bool:
        """Other ranks hold it up."""
        doing = self.doing
        if any(one.device for one in self.pending):
            return True  # its host may wait for it in any line: `loss.item()`
        silent = (doing.activity in SILENT and doing.asleep) or doing.activity in SPINS
        unsaid = (
            self.collectives is None and self.free and doing.asleep and doing.activity in LIBRARY
        )
        return doing.waits_for_others or unsaid or (silent and bool(self.pending))

    @property
    def place(self) -> str:
        """The innermost call of the script, in words; without its line, for a loop runs through several."""
        if self.doing.call is None:
            return ""
        function, file, _ = self.doing.call
        return f"{file} in {function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    ranks: tuple[int, ...]
    """The culprits; empty where no rank stands apart."""
    nodes: tuple[NodeId, ...]
    """Theirs."""
    places: tuple[str, ...]
    """Where in the code each of them is."""
    reason: str
    """In one line: who, where, and what the others do."""
    soft: bool = False
    """It may be wrong."""
    machine: bool = False
    """It may be a machine's fault, or that of what is between them: held by the kernel, a kernel on a device that does
    not end, or a collective that all have begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what may take, in seconds."""

    allowed: float
    """A step, by the round's own rhythm."""
    stepped: bool
    """The round had its first step. Before it a rank may well download, tokenize or load while others wait, and
    a script may have none."""
    phases: Mapping[int, str]
    """By rank, what its script says it does; those that say nothing are not here."""
    judged: Mapping[str, float]
    """Seconds that nothing had moved for at the last verdict by soft evidence, by place."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    """How long a phase has taken at most, by its name."""

    @property
    def long(self) -> float:
        patiences = LONG_PATIENCES if self.stepped else UNSTEPPED_PATIENCES
        return max(LONG, patiences * self.allowed)

    def of(self, looks: tuple[Seen, ...]) -> float:
        """Of a rank that does not move, by what it does."""
        seen, doing = looks[-1], looks[-1].doing
        if self.phases.get(seen.rank) in (LEAVING, PERSISTING):
            return math.inf
        if not self.stepped:
            stuck = _lost_worker(looks) or _held(looks)
            return max(self.long, self.again(seen)) if stuck else math.inf
        if self.named(seen):
            return self.rare(looks)
        if _lost_worker(looks):
            return self.here(seen)
        if doing.activity in PATIENT or seen.state == "t":  # by a debugger
            return self.rare(looks)
        if all(look.state == "D" for look in looks):
            return self.here(seen) if _held(looks) else self.rare(looks)
        if not seen.stack:
            return FOREVER  # it begins, or ends
        if _endless(looks):
            return self.of_device(seen)  # a queue is no longer than a step or two
        if seen.state == "D" or (doing.asleep and doing.activity in SLEEPING):
            return self.rare(looks)
        if _worked(looks) and not _in_python(looks):
            return FOREVER
        return self.here(seen)

    def named(self, seen: Seen) -> bool:
        """Its script says, or its functions' names do, that it does something besides training."""
        return bool(self.phases.get(seen.rank)) or _is_rare(seen.stack)

    def rare(self, looks: tuple[Seen, ...]) -> float:
        """Of what may take long for a reason, and for as long as a model where it works at it."""
        seen = looks[-1]
        known = KNOWN * self.phase_seconds.get(self.phases.get(seen.rank, ""), 0.0)
        helped = 2 * sum(look.doing.helped for look in looks) > len(looks)
        loads = any(worker.state == "R" for look in looks for worker in look.doing.workers)
        works = _worked(looks) or helped or loads
        return max(FOREVER if works else self.long, known, self.again(seen))

    def of_device(self, seen: Seen) -> float:
        """Of a rank whose host waits for it, in whatever way."""
        slow = self.named(seen) or seen.doing.activity in PATIENT or not self.stepped
        return self.long if slow else self.here(seen)

    def here(self, seen: Seen) -> float:
        """Where it is in the code."""
        return max(self.allowed, min(self.again(seen), max(self.long, FOREVER)))

    def again(self, seen: Seen) -> float:
        """At least, since it was judged there before and may have been wrong."""
        return PATIENT_AFTER * self.judged.get(seen.place, 0.0)


def find(
    seen: Mapping[int, tuple[Seen, ...]],
    quiet: float,
    patience: Patience,
    ended: Mapping[int, NodeId] = NONE_ENDED,
) -> Found | None:
    """seen: looks by rank, oldest first; quiet: seconds since the round moved; ended: ranks that did, with 0, and their
    nodes."""
    looks = {rank: found for rank, found in seen.items() if len(found) > 1}
    last = {rank: _newest(found) for rank, found in looks.items()}
    if stopped := _stopped(looks):
        return _found(stopped, last, "is stopped")
    if starved := _starved(looks):
        return _found(starved, last, "does not go on, for a worker of its loader is stopped")
    if quiet < patience.allowed or not last:
        return None
    if any(found[-1].ticks > found[0].ticks + 1 for found in looks.values()):
        return None  # who finishes steps waits for nobody
    still = {rank for rank, found in looks.items() if not _moved(found) and _spans(found, patience)}
    apart = [s for s in last.values() if not s.waits]
    if not apart:
        return _all_wait(last, quiet, patience, ended) if len(still) == len(last) else None
    if len(apart) == len(last) and quiet < patience.long:  # nobody waits for them
        return None
    hung = [
        s
        for s in apart
        if s.rank in still and _had(looks[s.rank], quiet) >= patience.of(looks[s.rank])
    ]
    if not hung:
        return None
    found = _found(hung, last, "does not go on", soft=True)
    return replace(found, machine=found.machine or all(_endless(looks[s.rank]) for s in hung))


def find_without_steps(
    seen: Mapping[int, tuple[Seen, ...]],
    since: Mapping[int, float],
    patience: Patience,
    ended: Mapping[int, NodeId] = NONE_ENDED,
    *,
    begun: bool,
) -> Found | None:
    """The same where no rank ever had a step; since: what `unmoved` says of these looks; begun: all nodes have ranks,
    so that those that are seen may not be waiting for others."""
    looks = {rank: found for rank, found in seen.items() if len(found) > 1}
    last = {rank: _newest(found) for rank, found in looks.items()}
    if stopped := _stopped(looks):
        return _found(stopped, last, "is stopped")
    if not last:
        return None
    still = {rank: one.at - since[rank] for rank, one in last.items()}
    apart = [s for s in last.values() if not s.waits]
    if not apart:
        quiet = min(still.values())
        if not begun or quiet < patience.allowed:
            return None
        return _all_wait(last, quiet, patience, ended)
    hung = [s for s in apart if still[s.rank] >= patience.of(looks[s.rank])]
    return _found(hung, last, "does not go on", soft=True) if hung else None


def unmoved(
    seen: Mapping[int, tuple[Seen, ...]], before: Mapping[int, float]
) -> Mapping[int, float]:
    """By rank, the time of the look since which nothing shows that it goes on; before: what was said of the looks
    before the last."""
    since = {}
    for rank, (*older, last) in seen.items():
        if not older or _goes_on(older[-1], last):
            since[rank] = last.at
        else:
            since[rank] = before.get(rank, older[-1].at)
    return since


def _newest(looks: tuple[Seen, ...]) -> Seen:
    """The last look; what it has issued as it told before, where it did not answer now and has not moved since."""
    last = looks[-1]
    told = next((look for look in reversed(looks) if look.collectives is not None), last)
    if told is last or _moved((told, last)):
        return last
    return replace(last, collectives=told.collectives, transfers=told.transfers)


def _goes_on(before: Seen, after: Seen) -> bool:
    """It does something else, or works at it. Who waits for others works at nothing, even if it waits awake."""
    if after.state == "T":
        return False
    if _moved((before, after)):
        return True
    if before.stack and after.stack and before.doing.activity is not after.doing.activity:
        return True
    return not after.waits and _worked((before, after))


def _stopped(looks: Mapping[int, tuple[Seen, ...]]) -> list[Seen]:
    """At the last two looks."""
    return [found[-1] for found in looks.values() if found[-2].state == found[-1].state == "T"]


def _starved(looks: Mapping[int, tuple[Seen, ...]]) -> list[Seen]:
    """At the last two looks. Who stopped the worker may let it go on, but nobody knows when."""
    return [
        found[-1]
        for found in looks.values()
        if all(
            _at_loader(s) and any(worker.state == "T" for worker in s.doing.workers)
            for s in found[-2:]
        )
        and not _moved(found[-2:])
    ]


def _all_wait(
    last: Mapping[int, Seen], quiet: float, patience: Patience, ended: Mapping[int, NodeId]
) -> Found | None:
    """And none of them moves."""
    odd = _odd(last, ignoring=quiet >= patience.long)
    if odd and (quiet >= patience.long or not any(patience.named(s) for s in last.values())):
        return _found(odd, last, "waits apart")
    owed = _owed(last, ignoring=quiet >= patience.long)
    owing = [last[rank] for rank in _owing(owed, last)]
    if owing and quiet >= max(patience.of_device(s) for s in owing):
        return _owes(_found(owing, last, "waits apart", soft=True), owed)
    late = _not_begun(last)
    if late and quiet >= max(patience.of_device(s) for s in late):
        found = _found(late, last, "does not go on", soft=True)
        reason = f"{found.reason}; a kernel before that collective does not end on the device"
        return replace(found, reason=reason, machine=True)
    if quiet >= patience.long:
        return _of_ended(ended, last) or replace(
            _owes(_found([], last, "does not go on"), owed), machine=True
        )
    return None


def _of_ended(ended: Mapping[int, NodeId], last: Mapping[int, Seen]) -> Found | None:
    """A script whose ranks have not equally much to do."""
    if not ended:
        return None
    ranks, nodes = tuple(sorted(ended)), tuple(dict.fromkeys(ended.values()))
    have = "has" if len(ranks) == 1 else "have"
    reason = f"{_who(ranks, nodes[0])} {have} ended, with 0; {_others(last.values())}"
    return Found(ranks=ranks, nodes=nodes, places=(), reason=reason)


def _who(ranks: Sequence[int], node: NodeId) -> str:
    return f"rank {ranks[0]} on {node}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _spans(looks: tuple[Seen, ...], patience: Patience) -> bool:
    """They are far enough apart to show that it does not move."""
    return looks[-1].at - looks[0].at >= SPAN * patience.allowed


def _had(looks: tuple[Seen, ...], quiet: float) -> float:
    """Of the seconds since the round moved those that a rank had: where others have the processor most of the time, as these
    looks tell, it cannot be done as soon."""
    first, last = looks[0], looks[-1]
    if first.run_delay is None or last.run_delay is None:
        return quiet
    waited = (last.run_delay - first.run_delay) / max(last.taken - first.taken, 1e-3)
    return quiet if waited < STARVED else quiet * (1 - min(waited, 1.0))


def _is_rare(stack: Sequence[Call]) -> bool:
    """Not what a model calls, nor torch: what saves memory is a checkpoint there."""
    layers = [at for at, (_, file, _) in enumerate(stack) if file.endswith(MODULE)]
    callers = stack[max(layers, default=-1) + 1 :]
    return any(RARE.match(bare(name)) for name, file, _ in callers if "/torch/" not in file)


def _moved(looks: tuple[Seen, ...]) -> bool:
    """Between any two looks: another step, other functions, or another collective."""
    first = looks[0]
    for look in looks[1:]:
        both = look.collectives is not None and first.collectives is not None
        if look.ticks != first.ticks or (both and _issued(look) != _issued(first)):
            return True
        if look.stack and first.stack and moved(first.stack, look.stack):
            return True
    return False


def _issued(seen: Seen) -> tuple[object, object]:
    """Another thread may go on with transfers while the main one does not."""
    return seen.collectives, seen.transfers if seen.waits else None


def _held(looks: tuple[Seen, ...]) -> bool:
    """By the kernel, for something that does not come: it does no work in between."""
    return all(look.state == "D" and look.stack for look in looks) and not _worked(looks)


def _worked(looks: tuple[Seen, ...]) -> bool:
    """Its main thread used the processor between the first look and the last."""
    first, last = looks[0], looks[-1]
    return worked(first.cpu, last.cpu, seconds=last.at - first.at)


def _in_python(looks: tuple[Seen, ...]) -> bool:
    """In its own code at each of the last looks: a few may all find what calls a library again and again between two."""
    plain = [look.sure and look.doing.activity is Activity.PYTHON for look in looks[-ENOUGH:]]
    return all(plain) and len(plain) == ENOUGH


def _endless(looks: tuple[Seen, ...]) -> bool:
    """A kernel on its device does not end, which no collective is, and its host waits for it or is about to. What the
    device had at the first of these looks is not done: else it goes on, however slowly."""
    held = looks[-1].on_device is OnDevice.HELD and not looks[-1].waits
    return held and all(one.on_device in (OnDevice.HELD, OnDevice.UNKNOWN) for one in looks[1:])


def _lost_worker(looks: tuple[Seen, ...]) -> bool:
    """Its loader waits for a process that was there and is gone, or is stopped, or held by the kernel: the same one, which
    has not run in between. (One that has come to the end of its data stays a zombie, and is not waited for.)"""
    first, last = looks[0].doing.workers, looks[-1].doing.workers
    if not _at_loader(looks[-1]):
        return False
    if len(last) < len(first) or any(one.state == "T" or one.failed for one in last):
        return True
    held = [
        {(one.pid, one.switches) for one in look.doing.workers if one.state == "D"}
        for look in looks
    ]
    return bool(set.intersection(*held))


def _at_loader(seen: Seen) -> bool:
    """It waits for what a worker makes."""
    return seen.doing.activity is Activity.DATA and seen.doing.name == "_try_get_data"


def _pending(last: Mapping[int, Seen]) -> list[dict[int, Collective]]:
    """By process group, by rank."""
    groups: dict[str, dict[int, Collective]] = {}
    for rank, seen in last.items():
        for one in (o for o in seen.pending if o.known and not o.p2p):
            groups.setdefault(one.group, {})[rank] = one
    return list(groups.values())


def _odd(last: Mapping[int, Seen], *, ignoring: bool) -> list[Seen]:
    """The few whose collective of a number is another than that of the many in the same group; all of them, where
    none are many. Stages of a pipeline wait in groups of their own. ignoring: ranks that did not tell what they have
    issued; else nobody is named of whom they could say otherwise."""
    unsaid = sum(
        one.collectives is None or not all(o.known for o in one.pending) for one in last.values()
    )
    silent = 0 if ignoring else unsaid
    for pending in _pending(last):
        kinds = _of_one_number(pending)
        counts = Counter(kinds.values())
        if len(counts) > 1:
            (many, count), (_, second) = counts.most_common(2)
            few = [rank for rank, kind in kinds.items() if kind != many]
            if count > second + silent or not silent:
                return [last[rank] for rank in (few if count > second else kinds)]
    return []


def _of_one_number(pending: Mapping[int, Collective]) -> dict[int, str]:
    """By rank, what it has under the number that is to end first. Who is one further, as the root of a broadcast, had it
    before; of who is further still that is not known."""
    first = min(one.seq for one in pending.values())
    found = {
        rank: one.kind if one.seq == first else one.before if one.seq == first + 1 else ""
        for rank, one in pending.items()
    }
    return {rank: kind for rank, kind in found.items() if kind}


Owed = Mapping[int, Mapping[int, str]]
"""By a rank that waits for a send or a receive, who has not done its part yet; and that in words."""


def _owed(last: Mapping[int, Seen], *, ignoring: bool) -> Owed:
    """Who has a collective that is not over may wait in that, and is owed nothing. ignoring: ranks that did not tell;
    else nothing is said where there are any."""
    if not ignoring and any(one.transfers is None for one in last.values()):
        return {}
    owed: dict[int, dict[int, str]] = {}
    for rank, seen in last.items():
        if seen.collectives is None or not all(one.p2p for one in seen.pending):
            continue
        for peer, (sent, received) in (seen.transfers or {}).items():
            its = last[peer].transfers if peer in last else None
            if its is None:
                continue
            back, taken = its.get(rank, (0, 0))
            if received > back:
                words = f"rank {rank} receives number {received} from rank {peer}, which has sent {back}"
            elif sent > taken:
                words = (
                    f"rank {rank} sends number {sent} to rank {peer}, which has received {taken}"
                )
            else:
                continue
            owed.setdefault(rank, {})[peer] = words
    return owed


def _owing(owed: Owed, last: Mapping[int, Seen]) -> set[int]:
    """Ranks that wait for one another in a circle, or between two; of these who went on to a collective without its
    part of a transfer, where somebody did. Where there is no circle, messages or a collective may be on their way."""
    if not owed:
        return set()
    circle = last.keys() & circles(_waits(owed, last))
    return circle - owed.keys() or circle


def _waits(owed: Owed, last: Mapping[int, Seen]) -> Waits:
    """Of ranks, and of numbers of collectives in their group, each of which waits for those that are at it and
    for the number before: thousands of ranks may wait for thousands."""
    waits: dict[Hashable, set[Hashable]] = {rank: {*owed.get(rank, ())} for rank in last}
    groups: dict[str, dict[int, dict[int, bool]]] = {}
    for rank, seen in last.items():
        for one in (o for o in seen.collectives or () if o.known and not o.p2p):
            groups.setdefault(one.group, {}).setdefault(one.seq, {})[rank] = one.done
    for group, numbers in groups.items():
        before: set[Hashable] = set()
        for seq, ranks in sorted(numbers.items()):
            for rank in (r for r, done in ranks.items() if not done):
                waits[rank] |= before
            waits[group, seq] = before | ranks.keys()
            before = {(group, seq)}
    return waits


def _owes(found: Found, owed: Owed) -> Found:
    """With some of what its ranks owe or, where it names none, of what is owed."""
    said = (
        words
        for _, peers in sorted(owed.items())
        for peer, words in peers.items()
        if peer in found.ranks or not found.ranks
    )
    return replace(found, reason="; ".join((found.reason, *islice(said, MOST_OWED))))


def _not_begun(last: Mapping[int, Seen]) -> list[Seen]:
    """Those on whose device nothing of the collectives has begun, while the same one runs on others': another
    kernel of theirs does not end."""
    for pending in _pending(last):
        late = [rank for rank in pending if not any(o.started for o in last[rank].pending)]
        if 0 < len(late) < len(pending):
            return [last[rank] for rank in late]
    return []


def _found(
    culprits: Collection[Seen], last: Mapping[int, Seen], how: str, *, soft: bool = False
) -> Found:
    ranks = tuple(sorted(s.rank for s in culprits))
    nodes = tuple(dict.fromkeys(last[rank].node for rank in ranks))
    if not ranks:
        return Found(
            ranks=(), nodes=(), places=(), reason=f"no rank goes on: {_others(last.values())}"
        )
    places = tuple(dict.fromkeys(last[rank].place for rank in ranks))
    first = last[ranks[0]]
    who = _who(ranks, first.node)
    rest = [s for s in last.values() if s.rank not in ranks]
    each = dict.fromkeys(describe(last[rank]) for rank in ranks)
    what = " | ".join(islice(each, MOST_PLACES))
    reason = f"{who} {how if len(ranks) == 1 else _plural(how)}: {what}"
    if rest:
        reason += f"; {_others(rest)}"
    machine = any(s.state == "D" for s in culprits)
    return Found(ranks=ranks, nodes=nodes, places=places, reason=reason, soft=soft, machine=machine)


def natively(found: Found, seen: Mapping[int, tuple[Seen, ...]]) -> Found:
    """With where its first rank is in a library, innermost first, where a close look told that."""
    stack = seen[found.ranks[0]][-1].stack if found.ranks and found.ranks[0] in seen else ()
    names = [name for name, *_ in filter(is_native, stack) if not name.startswith(("0x", "<"))]
    where = f"; in C: {' < '.join(names[:3])}" if names else ""
    return replace(found, reason=found.reason + where)


def _plural(how: str) -> str:
    verb, _, rest = how.partition(" ")
    return f"{ {'is': 'are', 'does': 'do', 'waits': 'wait'}[verb] } {rest}"


def describe(seen: Seen) -> str:
    """What one rank does, in words."""
    what = seen.doing.name or seen.doing.activity.value
    if seen.state == "D":
        what = f"{what}, held by the kernel"
    if seen.waits and seen.pending:
        what += f" ({', '.join(str(one) for one in seen.pending[:2])})"
    elif seen.on_device is OnDevice.HELD and not seen.waits:
        what += ", and a kernel on its device does not end"
    elif seen.on_device is OnDevice.IDLE and not seen.waits:
        what += ", and its device has nothing to do"
    if seen.doing.call is None:
        return what
    function, file, line = seen.doing.call
    return f"{what}, in {file}:{line} in {function}"


def _others(rest: Collection[Seen]) -> str:
    """What most of them do."""
    (what, count), *_ = Counter(describe(seen) for seen in rest).most_common(1)
    return f"{count} of {len(rest)} others: {what}" if len(rest) > 1 else f"the other: {what}"


def account(found: Found, seen: Mapping[int, tuple[Seen, ...]]) -> str:
    """For people: the verdict, all ranks' stacks as one tree, who is apart in it, and what each rank does."""
    last = [looks[-1] for _, looks in sorted(seen.items())]
    tree = merge({one.rank: one.stack for one in last})
    stacks = render(tree)
    if (apart := odd(tree)) is not None:
        where = bare(apart.call[0])
        if where.startswith("0x"):  # a library has no names for its own
            where = next((one.doing.name for one in last if one.rank in apart.ranks), "") or where
        stacks += f"\napart: {ranges(apart.ranks)}, in {where or 'no stack'}"
    lines = (
        f"rank {one.rank} on {one.node}, {one.state or 'gone'}: {describe(one)}{_unsaid(one)}"
        for one in last
    )
    return "\n".join((found.reason, "", stacks, "", *lines, ""))


def _unsaid(seen: Seen) -> str:
    """What a verdict's one line has no room for."""
    if seen.collectives is None:
        said = "; does not say what it has issued"
    elif seen.collectives and not seen.pending:
        said = f"; issued last: {seen.collectives[-1]}"
    else:
        said = ""
    return said + (f"; in the kernel: {' < '.join(seen.kernel)}" if seen.kernel else "")

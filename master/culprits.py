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
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType

from elastic.master import waiting
from elastic.master.activity import Activity, OnDevice, is_native
from elastic.master.events import NodeId
from elastic.master.seen import (
    Seen,
    at_loader,
    endless,
    goes_on,
    had,
    has_help,
    has_moved,
    has_worked,
    held,
    in_python,
    is_rare,
    lost_worker,
    newest,
)
from elastic.master.tree import bare, merge, odd, ranges, render
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

PATIENT = frozenset({Activity.COMPILE, Activity.CHECKPOINT, Activity.DATA})
SLEEPING = frozenset({Activity.SLEEP, Activity.LOCK, Activity.FILE, Activity.WAIT})
"""Waits for something that is none of the ranks: a disk, a network, another process."""
SPAN = 0.3
"""Of the patience: from the first look at a rank to the last."""
NONE_ENDED: Mapping[int, NodeId] = MappingProxyType({})
PATIENT_AFTER = 4


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
        if doing.activity is Activity.DEBUGGER:
            return math.inf  # for as long as a person thinks
        if not self.stepped:
            stuck = lost_worker(looks) or held(looks)
            return max(self.long, self.again(seen)) if stuck else math.inf
        if self.named(seen):
            return self.rare(looks)
        if lost_worker(looks):
            return self.here(seen)
        if doing.activity in PATIENT or seen.state == "t":  # by a debugger
            return self.rare(looks)
        if all(look.state == "D" for look in looks):
            return self.here(seen) if held(looks) else self.rare(looks)
        if not seen.stack:
            return FOREVER  # it begins, or ends
        if endless(looks):
            return self.of_device(seen)  # a queue is no longer than a step or two
        if seen.state == "D" or (doing.asleep and doing.activity in SLEEPING):
            return self.rare(looks)
        if has_worked(looks) and not in_python(looks):
            return FOREVER
        return self.here(seen)

    def named(self, seen: Seen) -> bool:
        """Its script says, or its functions' names do, that it does something besides training."""
        return bool(self.phases.get(seen.rank)) or is_rare(seen.stack)

    def rare(self, looks: tuple[Seen, ...]) -> float:
        """Of what may take long for a reason, and for as long as a model where it works at it."""
        seen = looks[-1]
        known = KNOWN * self.phase_seconds.get(self.phases.get(seen.rank, ""), 0.0)
        helped = 2 * sum(look.doing.helped for look in looks) > len(looks)
        loads = any(worker.state == "R" for look in looks for worker in look.doing.workers)
        works = has_worked(looks) or has_help(looks) or helped or loads
        again = self.again(seen)
        if works:
            return max(FOREVER, known, again)
        return max(self.long, known, min(again, FOREVER))

    def of_device(self, seen: Seen) -> float:
        """Of a rank whose host waits for it, in whatever way."""
        slow = self.named(seen) or seen.doing.activity in PATIENT or not self.stepped
        return max(self.long if slow else 0.0, self.here(seen))

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
    last = {rank: newest(found) for rank, found in looks.items()}
    if stopped := _stopped(looks):
        return _found(stopped, last, "is stopped")
    if starved := _starved(looks):
        return _found(starved, last, "does not go on, for a worker of its loader is stopped")
    if quiet < patience.allowed or not last:
        return None
    if any(found[-1].ticks > found[0].ticks + 1 for found in looks.values()):
        return None  # who finishes steps waits for nobody
    still = {
        rank for rank, found in looks.items() if not has_moved(found) and _spans(found, patience)
    }
    apart = [s for s in last.values() if not s.waits]
    if not apart:
        return _all_wait(last, quiet, patience, ended) if len(still) == len(last) else None
    if len(apart) == len(last) and quiet < patience.long:  # nobody waits for them
        return None
    hung = [
        s
        for s in apart
        if s.rank in still and had(looks[s.rank], quiet) >= patience.of(looks[s.rank])
    ]
    if not hung:
        return None
    hung = [s for s in hung if not s.may_wait] or hung
    found = _found(hung, last, "does not go on", soft=True)
    return replace(found, machine=found.machine or all(endless(looks[s.rank]) for s in hung))


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
    last = {rank: newest(found) for rank, found in looks.items()}
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
        if not older or goes_on(older[-1], last):
            since[rank] = last.at
        else:
            since[rank] = before.get(rank, older[-1].at)
    return since


def _stopped(looks: Mapping[int, tuple[Seen, ...]]) -> list[Seen]:
    """At the last two looks."""
    return [found[-1] for found in looks.values() if found[-2].state == found[-1].state == "T"]


def _starved(looks: Mapping[int, tuple[Seen, ...]]) -> list[Seen]:
    """At the last two looks. Who stopped the worker may let it go on, but nobody knows when."""
    return [
        found[-1]
        for found in looks.values()
        if all(
            at_loader(s) and any(worker.state == "T" for worker in s.doing.workers)
            for s in found[-2:]
        )
        and not has_moved(found[-2:])
    ]


def _all_wait(
    last: Mapping[int, Seen], quiet: float, patience: Patience, ended: Mapping[int, NodeId]
) -> Found | None:
    """And none of them moves."""
    trains = quiet >= patience.long or not any(patience.named(s) for s in last.values())
    odd = waiting.odd(last, ignoring=quiet >= patience.long)
    if odd and trains:
        return _found(odd, last, "waits apart")
    crossed = waiting.crossed(last)
    if crossed and trains and quiet >= max(patience.of_device(last[rank]) for rank in crossed):
        found = _found([last[rank] for rank in crossed], last, "waits apart")
        return _owes(found, crossed)
    owed = waiting.owed(last, ignoring=quiet >= patience.long)
    owing = [last[rank] for rank in waiting.owing(owed, last)]
    if owing and quiet >= max(patience.of_device(s) for s in owing):
        return _owes(_found(owing, last, "waits apart", soft=True), owed)
    late = waiting.not_begun(last)
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
    reason = f"{_who(ranks, nodes[0])} {have} ended, with 0; {_most(last.values(), 'others')}"
    return Found(ranks=ranks, nodes=nodes, places=(), reason=reason)


def _who(ranks: Sequence[int], node: NodeId) -> str:
    return f"rank {ranks[0]} on {node}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def _spans(looks: tuple[Seen, ...], patience: Patience) -> bool:
    """They are far enough apart to show that it does not move."""
    return looks[-1].at - looks[0].at >= SPAN * patience.allowed


def _owes(found: Found, owed: waiting.Owed) -> Found:
    """With some of what its ranks owe or, where it names none, of what is owed."""
    said = (
        words
        for _, peers in sorted(owed.items())
        for peer, words in peers.items()
        if peer in found.ranks or not found.ranks
    )
    return replace(found, reason="; ".join((found.reason, *islice(said, MOST_OWED))))


def _found(
    culprits: Collection[Seen], last: Mapping[int, Seen], how: str, *, soft: bool = False
) -> Found:
    ranks = tuple(sorted(s.rank for s in culprits))
    nodes = tuple(dict.fromkeys(last[rank].node for rank in ranks))
    if not ranks:
        return Found(
            ranks=(),
            nodes=(),
            places=(),
            reason=f"no rank goes on: {_most(last.values(), 'ranks')}",
        )
    places = tuple(dict.fromkeys(last[rank].place for rank in ranks))
    first = last[ranks[0]]
    who = _who(ranks, first.node)
    rest = [s for s in last.values() if s.rank not in ranks]
    each = dict.fromkeys(describe(last[rank]) for rank in ranks)
    what = " | ".join(islice(each, MOST_PLACES))
    reason = f"{who} {how if len(ranks) == 1 else _plural(how)}: {what}"
    if rest:
        reason += f"; {_most(rest, 'others')}"
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


def _most(them: Collection[Seen], noun: str) -> str:
    """What most of them do. noun: ranks, or others."""
    (what, count), *_ = Counter(describe(seen) for seen in them).most_common(1)
    who = f"{count} of {len(them)} {noun}" if len(them) > 1 else f"the {noun.removesuffix('s')}"
    return f"{who}: {what}"


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

"""Who makes a round hang: from two looks or more at each of its ranks. Pure.

Hard evidence is a process that is stopped, or ranks that all wait, one of them in another collective than the
others. Soft evidence is a rank that stands apart and does not move while the others wait in a collective. What
may take long for a reason (compiling, a checkpoint, an evaluation, data that come late, anything that sleeps)
gets `LONG`. And a verdict by soft evidence may be wrong, for a script may do something rare: each at the same
place makes the next one there take `PATIENT_AFTER` times as long.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elastic.master.activity import Activity, Doing, moved
from elastic.master.events import NodeId
from elastic.master.tree import Call, bare, merge, ranges, render

LONG, LONG_PATIENCES = 60.0, 20
"""Seconds, and patiences, that a round may stand still for a reason; the larger of them."""
FOREVER = 600.0
"""Seconds that a model may compute by itself: its layers all look alike, whether it goes on or not."""

PATIENT = frozenset({Activity.COMPILE, Activity.CHECKPOINT, Activity.DATA})
SLEEPING = frozenset({Activity.SLEEP, Activity.LOCK, Activity.FILE, Activity.WAIT})
"""Waits for something that is none of the ranks: a disk, a network, another process."""
RARE = re.compile(
    r"_*(eval|valid|test|predict|generat|infer|save|checkpoint|upload|download)", re.IGNORECASE
)
"""Beginnings of functions' names of a script that does something besides training."""
PATIENT_AFTER = 4
COMPUTING = frozenset({Activity.BACKWARD, Activity.OPTIMIZER, Activity.NATIVE, Activity.DEVICE})
SILENT = frozenset({Activity.WAIT, Activity.BACKWARD, Activity.OPTIMIZER, Activity.DEVICE})
"""May wait for others in a library's code, of which no stack tells: collectives do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The last that a rank has issued in one process group."""

    group: str
    seq: int
    op: str
    sizes: str
    started: bool = False
    """On the device, where the library tells."""
    done: bool

    def __str__(self) -> str:
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
    quiet: float = 0.0
    """Seconds since its last step; 0: it had none."""
    ticks: int = 0
    cpu: float = 0.0
    """Seconds of it that its main thread used."""

    @property
    def pending(self) -> tuple[Collective, ...]:
        """What it has issued, and what is not known to be over."""
        return tuple(one for one in self.collectives or () if not one.done)

    @property
    def waits(self) -> bool:
        """Other ranks hold it up."""
        doing = self.doing
        silent = doing.activity in SILENT and doing.asleep and bool(self.pending)
        return doing.waits_for_others or silent

    @property
    def place(self) -> str:
        """The innermost call of the script, in words."""
        if self.doing.call is None:
            return ""
        function, file, line = self.doing.call
        return f"{file}:{line} in {function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    ranks: tuple[int, ...]
    """The culprits; empty where no rank stands apart."""
    nodes: tuple[NodeId, ...]
    """Theirs."""
    place: str
    """Where in the code, for what makes two hangs the same."""
    reason: str
    """In one line: who, where, and what the others do."""
    soft: bool = False
    """It may be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what may take, in seconds."""

    allowed: float
    """A step, by the round's own rhythm."""
    stepped: bool
    """The round had its first step. Before it a rank may well download, tokenize or load while others wait."""
    phases: Mapping[int, str]
    """By rank, what its script says it does; those that say nothing are not here."""
    judged: Mapping[str, int]
    """Verdicts by soft evidence so far, by place."""

    @property
    def long(self) -> float:
        return max(LONG, LONG_PATIENCES * self.allowed)

    def of(self, looks: tuple[Seen, ...]) -> float:
        """Of a rank that does not move, by what it does."""
        seen, doing = looks[-1], looks[-1].doing
        if not self.stepped:
            return math.inf
        if doing.activity is not Activity.CHECKPOINT and (seen.state == "D" or _lost_worker(doing)):
            return self._here(seen)
        if not seen.stack:
            return FOREVER  # it begins, or ends
        if self.phases.get(seen.rank) or doing.activity in PATIENT or _is_rare(seen.stack):
            return self.long
        if doing.asleep and doing.activity in SLEEPING:
            return self.long
        if doing.activity in COMPUTING and seen.cpu > looks[0].cpu:
            return FOREVER
        return self._here(seen)

    def _here(self, seen: Seen) -> float:
        return float(self.allowed * PATIENT_AFTER ** self.judged.get(seen.place, 0))


def find(seen: Mapping[int, tuple[Seen, ...]], quiet: float, patience: Patience) -> Found | None:
    """seen: looks by rank, oldest first; quiet: seconds since the round moved."""
    looks = {rank: found for rank, found in seen.items() if len(found) > 1}
    last = {rank: found[-1] for rank, found in looks.items()}
    if stopped := [s for s in last.values() if _both(looks[s.rank], Activity.STOPPED)]:
        return _found(stopped, last, "is stopped")
    if quiet < patience.allowed or not last:
        return None
    apart = [s for s in last.values() if not s.waits]
    if not apart:
        odd = _odd(last)
        return _found(odd, last, "waits apart") if odd or quiet >= patience.long else None
    hung = [s for s in apart if not _moved(looks[s.rank]) and quiet >= patience.of(looks[s.rank])]
    if len(apart) == len(last) and quiet < 2 * patience.allowed:
        return None  # nobody waits for them
    return _found(hung, last, "does not go on", soft=True) if hung else None


def _is_rare(stack: Collection[Call]) -> bool:
    """Not torch's own, which calls what saves memory a checkpoint."""
    return any(RARE.match(bare(name)) for name, file, _ in stack if "/torch/" not in file)


def _both(looks: tuple[Seen, ...], activity: Activity) -> bool:
    return all(look.doing.activity is activity for look in looks[-2:])


def _moved(looks: tuple[Seen, ...]) -> bool:
    """Between any two looks: another step, other functions, or another collective."""
    first = looks[0]
    return any(
        (look.ticks, look.collectives) != (first.ticks, first.collectives)
        or moved(first.stack, look.stack)
        for look in looks[1:]
    )


def _lost_worker(doing: Doing) -> bool:
    """Its loader waits for a process that is gone, stopped, or held by the kernel."""
    if doing.activity is not Activity.DATA or doing.name != "_try_get_data":
        return False
    return not doing.workers or not set("TtDZX").isdisjoint(doing.workers)


def _odd(last: Mapping[int, Seen]) -> list[Seen]:
    """All wait: the few whose pending collective is another than that of the many, in the same group, or has not
    begun on their device where it has on the others'. Stages of a pipeline wait in different ways anyhow."""
    groups: dict[str, dict[int, Collective]] = {}
    for rank, seen in last.items():
        for one in seen.pending:
            groups.setdefault(one.group, {})[rank] = one
    for pending in groups.values():
        kinds = Counter((one.seq, one.op, one.sizes) for one in pending.values())
        if len(kinds) > 1:
            (many, count), (_, second) = kinds.most_common(2)
            few = [rank for rank, o in pending.items() if (o.seq, o.op, o.sizes) != many]
            return [last[rank] for rank in (few if count > second else pending)]
        late = [rank for rank, one in pending.items() if not one.started]
        if 0 < 2 * len(late) < len(pending):
            return [last[rank] for rank in late]  # something runs before it on their devices
    return []


def _found(
    culprits: Collection[Seen], last: Mapping[int, Seen], how: str, *, soft: bool = False
) -> Found:
    ranks = tuple(sorted(s.rank for s in culprits))
    nodes = tuple(dict.fromkeys(last[rank].node for rank in ranks))
    if not ranks:
        return Found(
            ranks=(), nodes=(), place="", reason=f"no rank goes on: {_others(last.values())}"
        )
    first = last[ranks[0]]
    who = f"rank {ranks[0]} on {first.node}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"
    rest = [s for s in last.values() if s.rank not in ranks]
    reason = f"{who} {how if len(ranks) == 1 else _plural(how)}: {describe(first)}"
    if rest:
        reason += f"; {_others(rest)}"
    return Found(ranks=ranks, nodes=nodes, place=first.place, reason=reason, soft=soft)


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
    return f"{what}, in {seen.place}" if seen.place else what


def _others(rest: Collection[Seen]) -> str:
    """What most of them do."""
    (what, count), *_ = Counter(describe(seen) for seen in rest).most_common(1)
    return f"{count} of {len(rest)} others: {what}" if len(rest) > 1 else f"the other: {what}"


def account(found: Found, seen: Mapping[int, tuple[Seen, ...]]) -> str:
    """For people: the verdict, all ranks' stacks as one tree, and what each rank does."""
    last = [looks[-1] for _, looks in sorted(seen.items())]
    stacks = render(merge({one.rank: one.stack for one in last}))
    lines = (
        f"rank {one.rank} on {one.node}, {one.state or 'gone'}: {describe(one)}" for one in last
    )
    return "\n".join((found.reason, "", stacks, "", *lines, ""))

"""Which node, GPU or link is at fault, from tests of nodes two by two; or what is tested next. Pure.

What a node says of its own work (a crash, a wrong checksum, a slow matmul) is about itself. What two
nodes do together is about either of them or about the link between them, and is told apart by who else
they can work with:

* A node is *good* once it has worked with any other in time. Both ends of a link that works are.
* A link that does not work, twice, between two good nodes is at fault itself.
* A node that works with nobody is at fault: by definition once it was tested with all good ones that
  there are, and before that once with so many that it cannot be the links, by the odds of links so far.
* Of two nodes alone, both fine by their solo probes, the link is.

It is impossible in principle, and said to be undecided, where no two of three or more nodes work
together (two bad nodes explain that as well as bad links do), where two nodes alone do not and a solo
probe is missing, and where a time has nothing to be compared with. A slow link needs another beside it.
What `Limits.rounds` rounds leave open is undecided, too. Nobody is accused of that.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from elastic.master import grouping
from elastic.master.events import NodeId
from elastic.master.grouping import Group, Wanted
from elastic.master.pair_results import (
    Kind,
    Labels,
    Limits,
    Link,
    Reading,
    Round,
    Verdict,
    blame,
    link,
    name,
    read,
)


class Found(StrEnum):
    FINE = "fine"
    FAULTY = "faulty"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """What a node's probe of itself found."""

    found: Found = Found.UNKNOWN
    what: str = ""
    gpu: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """One of these is at fault, or several; no test that there is tells which."""

    nodes: tuple[NodeId, ...]
    links: tuple[Link, ...]
    what: str

    def __str__(self) -> str:
        nodes = [f"node {node_id}" for node_id in self.nodes]
        return f"undecided between {_some([*nodes, *map(_link, self.links)])}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do next; without groups, all that can be known is."""

    groups: tuple[Group, ...] = ()
    """To be tested next, all at once."""
    verdicts: tuple[Verdict, ...] = ()
    """What is known to be at fault by now; only ever grows within a probe but by slow figures."""
    undecided: tuple[Undecided, ...] = ()
    reason: str


def decide(
    labels: Labels,
    solo: Mapping[NodeId, Solo],
    rounds: Sequence[Round],
    limits: Limits = Limits(),  # noqa: B008 - frozen
    turn: int = 0,
) -> Plan:
    """labels: all nodes that are probed, with where each is; rounds: results so far, oldest first; turn: how often
    they were tested before, and something still does not work. Of few nodes all meet then that work.

    A node that is gone is left out of `labels`, and what others did with it counts no more.
    """
    reading = read(labels, rounds, limits)
    alone = tuple(
        blame(node_id, solo[node_id].gpu, solo[node_id].what or "its solo probe failed")
        for node_id in labels
        if node_id in solo and solo[node_id].found is Found.FAULTY
    )
    named = {verdict.nodes[0] for verdict in alone}
    own = (*alone, *(verdict for verdict in reading.own if verdict.nodes[0] not in named))
    out = {verdict.nodes[0] for verdict in own}
    left = {node_id: label for node_id, label in labels.items() if node_id not in out}
    if len(left) < 2:
        return Plan(verdicts=own, reason=_done(own, (), "there are no two nodes to be paired"))
    if not rounds:
        groups = grouping.first(left, turn)
        return Plan(groups=groups, verdicts=own, reason=f"round 1: {len(left)} nodes in pairs")
    case = _Case.of(left, reading, limits)
    verdicts = (*own, *case.verdicts(), *_two_alone(case, solo))
    groups = () if len(rounds) >= limits.rounds else case.next(limits.star)
    if turn and not groups and len(left) <= grouping.FEW and len(rounds) < limits.rounds:
        groups = grouping.among(case.good, case.tested)
    if groups:
        return Plan(groups=groups, verdicts=verdicts, reason=case.why(len(rounds) + 1))
    undecided = tuple(case.undecided(verdicts))
    spent = "" if len(rounds) < limits.rounds else f"after {len(rounds)} rounds"
    return Plan(verdicts=verdicts, undecided=undecided, reason=_done(verdicts, undecided, spent))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is known of the nodes that have not proved their own fault."""

    labels: Labels
    reading: Reading
    bad: Mapping[Link, tuple[str, ...]]
    """Links between two of them that never worked."""
    good: tuple[NodeId, ...]
    suspects: Mapping[NodeId, tuple[NodeId, ...]]
    """The others, each with the good nodes that it does not work with."""
    enough: int
    """With so many it is the node, and not the links."""

    @classmethod
    def of(cls, labels: Labels, reading: Reading, limits: Limits) -> "_Case":
        works = {node_id for which in reading.good for node_id in which}
        bad = {which: what for which, what in reading.bad.items() if labels.keys() >= set(which)}
        suspects: dict[NodeId, list[NodeId]] = {n: [] for n in labels if n not in works}
        for a, b in bad:
            for one, other in ((a, b), (b, a)):
                if one in suspects and other in works:
                    suspects[one].append(other)
        between = sum(a in works and b in works for a, b in bad)
        return cls(
            labels=labels,
            reading=reading,
            bad=bad,
            good=tuple(node_id for node_id in labels if node_id in works),
            suspects={node_id: tuple(others) for node_id, others in suspects.items()},
            enough=enough(len(reading.good) + between, between, limits.risk),
        )

    def guilty(self, node_id: NodeId) -> bool:
        """A suspect that works with none of enough good nodes, or of all."""
        others = len(self.suspects[node_id])
        return others >= 2 and others >= min(self.enough, len(self.good))

    def links(self) -> Iterator[Link]:
        """Bad ones between good nodes."""
        for a, b in self.bad:
            if a not in self.suspects and b not in self.suspects:
                yield a, b

    def verdicts(self) -> Iterator[Verdict]:
        for node_id, others in self.suspects.items():
            if self.guilty(node_id):
                what = _some(sorted({self.bad[link(node_id, other)][-1] for other in others}))
                yield blame(node_id, None, f"works with none of {_some(others)}: {what}")
        for which in self.links():
            if len(self.bad[which]) > 1:
                yield _blame_link(which, f"both work with others: {self.bad[which][-1]}")

    def open(self) -> list[NodeId]:
        """Suspects of whom more has to be known."""
        return [node_id for node_id in self.suspects if not self.guilty(node_id)]

    @property
    def tested(self) -> set[Link]:
        return self.bad.keys() | self.reading.good

    def next(self, star: int) -> tuple[Group, ...]:
        tested = self.tested
        if not self.good:
            groups = grouping.among(list(self.labels), tested)
            once = [which for which, what in self.bad.items() if len(what) == 1]
            if not groups and len(self.labels) == 2 and once:
                return (Group(pairs=(once[0],)),)
            return groups
        if len(self.labels) == 3 and not self.suspects and len(tested) < 3:
            return grouping.among(list(self.labels), tested)  # a slow hub has no other to compare
        wanted = Wanted(
            # one more than seems enough by now: this round's bad links may raise that
            suspects={n: max(self.enough - len(self.suspects[n]), 0) + 1 for n in self.open()},
            again=[which for which in self.links() if len(self.bad[which]) == 1],
            slow_once=[n for n in self.labels if n in self.reading.slow_once and n in self.good],
        )
        return grouping.further(self.labels, self.good, wanted, tested, star)

    def why(self, number: int) -> str:
        again = sum(len(self.bad[which]) == 1 for which in self.links())
        slow = len(self.reading.slow_once)
        parts = [f"round {number}: {_count(len(self.open()), 'suspect')}, {len(self.good)} good"]
        parts += [f"{_count(again, 'link')} tested again"] * bool(again)
        parts += [f"{slow} slow by their own figures"] * bool(slow)
        return ", ".join(parts)

    def undecided(self, verdicts: Sequence[Verdict]) -> Iterator[Undecided]:
        named = {verdict.nodes for verdict in verdicts}
        nodes = [node_id for node_id in self.open() if (node_id,) not in named]
        links = [w for w in self.bad if w not in named and not named & {(w[0],), (w[1],)}]
        if not self.good:
            if links:
                what = "no two of them work together"
                yield Undecided(nodes=tuple(nodes), links=tuple(links), what=what)
            return
        for node_id in nodes:
            own = tuple(which for which in links if node_id in which)
            what = "too few tests are left" if own else "no test was clearly in time"
            yield Undecided(nodes=(node_id,), links=own, what=what)
        for which in self.links():
            if which in links:
                what = f"seen once, maybe a disturbance: {self.bad[which][0]}"
                yield Undecided(nodes=(), links=(which,), what=what)
        for node_id in self.labels:
            if node_id in self.reading.slow_once:
                yield Undecided(nodes=(node_id,), links=(), what="its matmul was slow once")


def _two_alone(case: _Case, solo: Mapping[NodeId, Solo]) -> Iterator[Verdict]:
    """Two nodes, each fine by itself, that do not work together."""
    fine = all(node_id in solo and solo[node_id].found is Found.FINE for node_id in case.labels)
    if len(case.labels) == 2 and not case.good and fine:
        for which, what in case.bad.items():
            if len(what) > 1:
                yield _blame_link(which, f"both are fine alone, and not together: {what[-1]}")


def enough(tested: int, bad: int, risk: float) -> int:
    """With how many good nodes one has to fail until links alone are too unlikely a reason.

    tested, bad: links between good nodes. The odds of a bad one are taken from them, and from ten more
    of which half a one was bad. That all `n` of a healthy node are happens `2 x tested x odds**n` times
    in all, which is to be at most `risk`.
    """
    odds = (bad + 0.5) / (tested + 10)
    return max(2, math.ceil(math.log(risk / (2 * max(tested, 1))) / math.log(odds)))


def _blame_link(which: Link, what: str) -> Verdict:
    return Verdict(kind=Kind.LINK, nodes=which, what=what)


def _done(verdicts: Sequence[Verdict], undecided: Sequence[Undecided], note: str) -> str:
    found = [name(verdict) for verdict in verdicts]
    parts = [f"at fault: {_some(found)}" if found else "no fault found"]
    parts += [str(one) for one in undecided[:3]]
    parts += [f"{len(undecided) - 3} more undecided"] * (len(undecided) > 3)
    return "; ".join([*parts, *([note] if note else [])])


def _link(which: Link) -> str:
    return f"the link between {which[0]} and {which[1]}"


def _some(texts: Sequence[str], most: int = 5) -> str:
    rest = [f"{len(texts) - most} more"] if len(texts) > most else []
    return ", ".join([*texts[:most], *rest])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)

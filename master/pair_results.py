"""What tests of two nodes say: which links work, which nodes and GPUs are slow by their own figures. Pure.

A figure is slow beyond the median by a factor and by a number of median absolute deviations, over the
GPUs, or over the links. Nothing makes a healthy one fast, so of an even number the lower of the two
middle ones counts: half of all GPUs may be slow, and are found. A slow node has slow links to healthy
ones, so of links only those like the fastest quarter are asked for the median: three quarters may be slow.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elastic.master.events import NodeId

Link = tuple[NodeId, NodeId]
"""Two nodes, the lesser name first."""
Labels = Mapping[NodeId, str]
"""Where each node is (its switch, its rack); empty or missing: nobody knows."""


def link(a: NodeId, b: NodeId) -> Link:
    return (a, b) if a < b else (b, a)


class Outcome(StrEnum):
    """How a test of two nodes went, as one of them tells it."""

    PASSED = "passed"
    FAILED_ALONE = "failed alone"
    """Before it needed the other: its own work crashed, hung or had a wrong checksum."""
    FAILED = "failed"
    TIMED_OUT = "timed out"
    """While it waited for the other; what says nothing at all counts so, too."""


class Kind(StrEnum):
    NODE = "node"
    GPU = "GPU"
    LINK = "link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one node has to say of a test."""

    node_id: NodeId
    outcome: Outcome
    what: str = ""
    """What failed, in words."""
    gpu: int | None = None
    """Which GPU of the node's it failed on, where that is known."""
    matmul: tuple[float, ...] = ()
    """Seconds of one matmul on each of its GPUs (one on CPUs), in their order; empty: not measured."""
    gather: float = 0.0
    """Seconds of one allgather with the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Two nodes together, as each of them tells it."""

    __test__ = False  # for pytest
    a: Account
    b: Account

    @property
    def link(self) -> Link:
        return link(self.a.node_id, self.b.node_id)


Round = Sequence[Test]
"""All tests that were made at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is at fault."""

    kind: Kind
    nodes: tuple[NodeId, ...]
    """One; of a link its two ends."""
    gpu: int | None = None
    what: str

    def __str__(self) -> str:
        return f"{name(self)}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Beyond what a figure is slow, and how many tests there may be."""

    rounds: int = 3
    """Of paired tests; what they cannot tell stays undecided."""
    matmul_ratio: float = 1.08
    """Of the median; slower is slow, if it is beyond `mads` too."""
    gather_ratio: float = 1.2
    mads: float = 6.0
    """Median absolute deviations, each taken as 1.4826 of them: a standard deviation, were they normal."""
    star: int = 6
    """With how many others a node may be tested in one round, one after another."""
    risk: float = 1e-4
    """How many healthy nodes may be blamed in all, by the odds, for links that fail by chance."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.star < 2:
            raise ValueError("rounds must be at least 1, star at least 2")
        if self.matmul_ratio <= 1 or self.gather_ratio <= 1 or self.mads <= 0 or self.risk <= 0:
            raise ValueError("ratios must be above 1, mads and risk above 0")


_FEW_GPUS, _FEW_LINKS = 4, 8
"""Of fewer figures the spread is unknown, and most may be slow: the fastest is what is usual, and the
ratio's excess is taken three times."""
_NORMAL = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """All rounds, read."""

    own: tuple[Verdict, ...]
    """Of nodes and GPUs, each proved by the node's own account."""
    slow_once: frozenset[NodeId]
    """Nodes with a GPU that was slow in the only round that measured it."""
    good: frozenset[Link]
    """Links over which a test has passed in time, at least once."""
    bad: Mapping[Link, tuple[str, ...]]
    """The others that were tested: what was wrong, each time."""


def read(labels: Labels, rounds: Sequence[Round], limits: Limits) -> Reading:
    """labels: of the nodes that are meant; tests with others are left out."""
    known = [
        [test for test in tests if test.a.node_id in labels and test.b.node_id in labels]
        for tests in rounds
    ]
    slow, slow_once = _slow_gpus(known, limits)
    own = {verdict.nodes[0]: verdict for verdict in _failed_alone(known)}
    own_slow = [verdict for verdict in slow if verdict.nodes[0] not in own]
    good, bad = _links(labels, known, limits)
    return Reading(
        own=(*own.values(), *own_slow),
        slow_once=slow_once - set(own),
        good=good,
        bad=bad,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    usual: float
    slow: float
    """Seconds; longer is slow."""
    fair: bool = True
    """False: of other ways, which may be shorter. What is within is fine, the rest is not known."""


def beyond(figures: Sequence[float], ratio: float, mads: float, *, few: bool) -> Bound:
    """What is usual, and what is slow above: infinite where there is nothing to compare with."""
    if len(figures) < 2:
        return Bound(usual=figures[0] if figures else 0.0, slow=math.inf)
    if few:
        return Bound(usual=min(figures), slow=min(figures) * (1 + 3 * (ratio - 1)))
    usual = _lower_median(figures)
    spread = _lower_median([abs(figure - usual) for figure in figures])
    return Bound(usual=usual, slow=max(usual * ratio, usual + mads * _NORMAL * spread))


def _like_the_fastest(figures: Sequence[float], ratio: float) -> list[float]:
    """Those around the lower quartile."""
    quartile = sorted(figures)[(len(figures) - 1) // 4]
    return [figure for figure in figures if quartile / ratio <= figure <= quartile * ratio]


def _lower_median(figures: Sequence[float]) -> float:
    return sorted(figures)[(len(figures) - 1) // 2]


def _accounts(tests: Round) -> Iterator[Account]:
    for test in tests:
        yield test.a
        yield test.b


def _failed_alone(rounds: Sequence[Round]) -> Iterator[Verdict]:
    for tests in rounds:
        for account in _accounts(tests):
            if account.outcome is Outcome.FAILED_ALONE:
                yield blame(account.node_id, account.gpu, account.what or "failed alone")


def _slow_gpus(rounds: Sequence[Round], limits: Limits) -> tuple[list[Verdict], frozenset[NodeId]]:
    """A GPU is as fast as in its best round: what only disturbed it in one is forgotten."""
    best: dict[NodeId, dict[int, float]] = {}
    measured: dict[NodeId, set[int]] = {}
    for number, tests in enumerate(rounds):
        for account in _accounts(tests):
            if account.matmul:
                measured.setdefault(account.node_id, set()).add(number)
            gpus = best.setdefault(account.node_id, {})
            for gpu, seconds in enumerate(account.matmul):
                gpus[gpu] = min(gpus.get(gpu, seconds), seconds)
    figures = [seconds for gpus in best.values() for seconds in gpus.values()]
    bound = beyond(figures, limits.matmul_ratio, limits.mads, few=len(figures) < _FEW_GPUS)
    verdicts: list[Verdict] = []
    once: set[NodeId] = set()
    for node_id, gpus in best.items():
        slow = [gpu for gpu, seconds in gpus.items() if seconds > bound.slow]
        if slow and len(measured[node_id]) < 2:
            once.add(node_id)
        elif slow:
            verdicts += _slow(node_id, gpus, slow, bound.usual)
    return verdicts, frozenset(once)


def _slow(
    node_id: NodeId, gpus: Mapping[int, float], slow: Sequence[int], usual: float
) -> Iterator[Verdict]:
    """All of a node's are the node."""
    if len(slow) == len(gpus):
        worst = max(gpus.values())
        yield blame(node_id, None, f"a matmul takes {_took(worst, usual)}")
        return
    for gpu in slow:
        yield blame(node_id, gpu, f"a matmul takes {_took(gpus[gpu], usual)}")


def _links(
    labels: Labels, rounds: Sequence[Round], limits: Limits
) -> tuple[frozenset[Link], dict[Link, tuple[str, ...]]]:
    tests = [test for tests in rounds for test in tests]
    bounds = _bounds(labels, rounds, limits)
    good: set[Link] = set()
    wrong: dict[Link, tuple[str, ...]] = {}
    for test in tests:
        what = _wrong(test, bounds[_apart(labels, test.link)])
        if what:
            wrong[test.link] = (*wrong.get(test.link, ()), what)
        elif what is not None:
            good.add(test.link)
    bad = {which: what for which, what in wrong.items() if which not in good}
    return frozenset(good), bad


def _wrong(test: Test, bound: Bound) -> str | None:
    """What was wrong between the two; empty: nothing, None: it cannot be told."""
    failed = [one for one in (test.a, test.b) if one.outcome is not Outcome.PASSED]
    if failed:  # who only waited for the other knows least
        told = min(failed, key=lambda one: one.outcome is Outcome.TIMED_OUT)
        return told.what or told.outcome
    seconds = max(test.a.gather, test.b.gather)
    if seconds > bound.slow and bound.fair:
        return f"an allgather takes {_took(seconds, bound.usual)}"
    # a node on the verge of slow would have links of both sorts, and these be blamed for it
    return "" if seconds <= (bound.usual + bound.slow) / 2 else None


def _apart(labels: Labels, which: Link) -> bool:
    return labels[which[0]] != labels[which[1]]


def _bounds(labels: Labels, rounds: Sequence[Round], limits: Limits) -> dict[bool, Bound]:
    """Of allgathers between neighbours (False) and others (True): their ways differ in length.

    Only the first round says what is usual: later ones are about suspects, of whom most may be slow.
    """
    first, ratio = _gathers(labels, rounds[:1]), limits.gather_ratio
    links = _gathers(labels, rounds)
    found: dict[bool, Bound] = {}
    for apart in (False, True):
        if len(first[apart]) < _FEW_LINKS:
            found[apart] = beyond(links[apart], ratio, limits.mads, few=True)
        else:
            like = _like_the_fastest(first[apart], ratio)
            found[apart] = beyond(like, ratio, limits.mads, few=False)
    if len(first[True]) < _FEW_LINKS and links[False]:
        found[True] = replace(found[False], fair=False)
    return found


def _gathers(labels: Labels, rounds: Sequence[Round]) -> dict[bool, list[float]]:
    """The best of each link that worked."""
    links: dict[bool, dict[Link, float]] = {False: {}, True: {}}
    for test in (test for tests in rounds for test in tests):
        if test.a.outcome is test.b.outcome is Outcome.PASSED:
            of_kind = links[_apart(labels, test.link)]
            seconds = max(test.a.gather, test.b.gather)
            of_kind[test.link] = min(of_kind.get(test.link, seconds), seconds)
    return {apart: list(of_kind.values()) for apart, of_kind in links.items()}


def blame(node_id: NodeId, gpu: int | None, what: str) -> Verdict:
    """A node, or one of its GPUs."""
    kind = Kind.NODE if gpu is None else Kind.GPU
    return Verdict(kind=kind, nodes=(node_id,), gpu=gpu, what=what)


def name(verdict: Verdict) -> str:
    """What it blames, in words."""
    if verdict.kind is Kind.LINK:
        return f"the link between {verdict.nodes[0]} and {verdict.nodes[1]}"
    if verdict.kind is Kind.GPU:
        return f"GPU {verdict.gpu} of node {verdict.nodes[0]}"
    return f"node {verdict.nodes[0]}"


def _took(seconds: float, usual: float) -> str:
    return (
        f"{seconds:.3g} s, {seconds / usual:.2f} times what is usual" if usual else f"{seconds} s"
    )

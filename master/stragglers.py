"""Who holds a synchronous job up while it trains, since when, and what that costs. Pure.

Everybody waits for the slowest, so that one computes longest and *waits least*: the others' communication is what grows.
A rank's compute is therefore compared, interval by interval, with that of its peers, who do the same work at the same
time: what is common to all (warm-up, another batch size, a checkpoint) cancels out. Over time a rank has the median of
its last intervals, which a few wild ones do not move, and over ranks these have a spread, by their median distance
(MAD). Slow is who is behind by more than the policy's least and by more than the spread and the rank's own noise
explain.

Communication is what remains (`transfers.py`): where that grows and compute does not, a link is slow.

On GPUs times are the device's, and a slow rank's device or its host is named (`devices.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan, sqrt
from statistics import median_low
from typing import Literal

from elastic.master import devices, robust, transfers
from elastic.master.devices import Devices, Part
from elastic.master.intervals import Mark, Report
from elastic.master.transfers import Group

SETTLING = 5
"""Intervals at the beginning of a round that are not looked at: ranks warm up each in its own way."""
SWIFT = 3
"""Intervals in a row, far beyond all bounds, that are enough."""
FAR = 3.0
"""Bounds that is."""
FEW = 3.0
"""By how many parts of their number the spread of few peers may be larger than it looks."""
OF_A_MEDIAN = 1.25
"""How much wider a median varies than a mean does."""
MANIFOLD = 2.0
"""From which part on that is more it is told by how many times."""
SAMPLED = 1000
"""Ranks of whose medians the spread is, at most."""

Kind = Literal["rank", "node", "link", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    least: float = 0.06
    """Part of its peers' compute by which a slow rank is behind, and of a step by which slow transfers are longer."""
    wrong: float = 1e-5
    """How likely one of a job's ranks may be called slow that varies as the others do: by that, and the number of
    ranks, it has to be behind by four to six deviations."""
    restart: float = 30.0
    """Seconds that it takes to train again with another rank in its place."""
    margin: float = 2.0
    """Acting pays where what is lost otherwise is that many times what it costs."""
    horizon: float = 3600.0
    """Seconds that a job is taken to go on for, since its end is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What holds the job up. As text, a sentence."""

    kind: Kind
    """communication: transfers are slow, and times do not tell which link is."""
    ranks: tuple[int, ...]
    """Slow ones; of a link, those whose transfers are."""
    nodes: tuple[str, ...]
    """Theirs; of a link, the two ends, or one whose link to all others it is."""
    since: Mark
    behind: float
    """Part by which compute is longer than that of peers, or transfers than they were."""
    cost: float
    """Seconds of each step of the job: more than it takes whoever is slowest of those that are not named."""
    share: float
    """Part of a step that is."""
    pays: bool
    """Whether it is worth a restart."""
    part: Part = ""
    """Of a slow rank or node, what is slow; empty: not known."""

    @property
    def key(self) -> tuple[Kind, tuple[int, ...], tuple[str, ...]]:
        """The same as long as it is about the same."""
        return self.kind, self.ranks, self.nodes

    @property
    def _longer(self) -> str:
        """Than others, or than before."""
        if self.behind < MANIFOLD:
            return f"{self.behind:.0%} longer than"
        return f"{1 + self.behind:.3g} times as long as"

    def __str__(self) -> str:
        where = " and ".join(self.nodes)
        who = {
            "rank": f"rank {', '.join(map(str, self.ranks))} on {where} computes {self._longer} its peers",
            "node": f"all {len(self.ranks)} ranks on {where} compute {self._longer} their peers",
            "link": f"transfers over the link {'between' if len(self.nodes) > 1 else 'of'} {where} take "
            f"{self._longer} they did, and compute does not",
            "communication": f"transfers take {self._longer} they did, and compute does not; times do not tell which "
            "link it is",
        }[self.kind]  # fmt: skip
        who += _PARTS[self.part]
        advice = "replacing it pays" if self.pays else "a restart would cost more than it saves"
        return f"{who}, since step {self.since.step}: {self.cost:.3g} s of each step, {self.share:.1%} of the job; {advice}"


_PARTS: Mapping[Part, str] = {
    "": "",
    "device": ", on the device: its host is ahead of it",
    "host": ", for the device waits for its host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is remembered: some numbers a rank, however long the job runs."""

    round: int = -1
    intervals: int = 0
    """Since the round began."""
    marks: tuple[Mark, ...] = ()
    """Of the intervals in the windows, and of the one before them."""
    behind: Mapping[int, tuple[float, ...]] = field(default_factory=dict[int, tuple[float, ...]])
    """By rank, parts by which its compute was longer than its peers', newest last; NaN: not known."""
    devices: Devices = field(default_factory=Devices)
    groups: Mapping[str, Group] = field(default_factory=dict[str, Group])
    since: Mapping[int, Mark] = field(default_factory=dict[int, Mark])
    """Of slow ranks."""
    began: Mark | None = None
    """When transfers became slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    state: State
    verdicts: tuple[Verdict, ...]
    """All that stand now, the most expensive first."""
    reason: str


def decide(state: State, report: Report, now: float, policy: Policy) -> Decision:
    """Take an interval's times in; `now` is job time in seconds."""
    if state.round != report.round:
        state = State(round=report.round)
    mark = Mark(at=now, step=report.step)
    state = replace(
        state, intervals=state.intervals + 1, marks=(*state.marks, mark)[-robust.WINDOW - 1 :]
    )
    if state.intervals <= SETTLING:
        state = replace(state, marks=(mark,))
        return Decision(state=state, verdicts=(), reason="the round has only begun")
    state = replace(state, behind=_behind(state, report))
    medians = _medians(state)
    spread = robust.spread_of_most(_some([*medians.values()]))
    state = replace(state, devices=_devices(state, medians, spread, report, policy))
    slow = _slow(state, medians, spread, report, policy)
    state = replace(state, since={rank: _since(state, rank, bound) for rank, bound in slow.items()})
    step = median_low([one.compute + one.waiting for one in report.times.values()] or [0.0])
    state = _with_groups(state, report, step, policy)
    medians |= {rank: _now(state, rank) for rank in slow}
    found = (
        *_of_compute(state, medians, report, step, policy),
        *_of_links(state, report, step, policy),
    )
    verdicts = tuple(sorted(found, key=lambda one: -one.cost))
    return Decision(state=state, verdicts=verdicts, reason=_reason(state, report, verdicts))


def _reason(state: State, report: Report, verdicts: Sequence[Verdict]) -> str:
    if not report.times:
        return "no rank has told of its times"
    if verdicts:
        return "; ".join(map(str, verdicts))
    if len(state.marks) <= robust.LEAST:
        return f"{len(state.marks) - 1} of {robust.LEAST} intervals that it takes are known"
    alone = sum(len(ranks) == 1 for ranks in _by_peers(report).values())
    return "nobody is behind" + (f"; {alone} ranks have no peers" if alone else "")


# --- compute -------------------------------------------------------------------------------------


def _behind(state: State, report: Report) -> dict[int, tuple[float, ...]]:
    """Windows with this interval's. A peer in the middle, rather the faster one, is what others are compared with: so
    even where half of them are slow, it is they who are."""
    found = dict.fromkeys(report.seats, nan)
    for ranks in _by_peers(report).values():
        if len(ranks) > 1:
            usual = median_low([report.times[rank].compute for rank in ranks])
            for rank in ranks if usual > 0 else ():
                found[rank] = report.times[rank].compute / usual - 1
    before = state.behind
    return {rank: (*before.get(rank, ()), value)[-robust.WINDOW :] for rank, value in found.items()}


def _medians(state: State) -> dict[int, float]:
    """Of the windows in which enough is known to say anything of the rank."""
    return {
        rank: median_low(known)
        for rank, window in state.behind.items()
        if len(known := robust.known(window)) >= SWIFT
    }


def _devices(
    state: State, medians: Mapping[int, float], spread: float, report: Report, policy: Policy
) -> Devices:
    """With this interval."""
    peers = _by_peers(report).values()
    found = devices.taken_in(state.devices, report.times, peers, policy.least)
    now = robust.known([window[-1] for window in state.behind.values()])
    if not medians or max(now, default=0.0) > policy.least:
        return found
    return devices.calmed(found, report.times, spread)


def _slow(
    state: State, medians: Mapping[int, float], spread: float, report: Report, policy: Policy
) -> dict[int, float]:
    """Slow ranks, each with its bound."""
    if not medians:
        return {}
    deviations = robust.deviations(policy.wrong, len(medians))
    calm = spread
    if max(medians.values()) > policy.least:
        calm = devices.spread_by_themselves(state.devices, report.times, spread, policy.least)
    explained = deviations * spread
    of_peers = {
        peers: explained * (1 + FEW / len(ranks)) for peers, ranks in _by_peers(report).items()
    }
    found = {}
    for rank, middle in medians.items():
        usual = of_peers.get(report.seats[rank].peers, explained)
        if (
            middle > policy.least
            and calm < spread
            and devices.part(state.devices, [rank]) == "device"
        ):
            usual *= calm / spread
        bound = max(policy.least, usual)
        known = robust.known(state.behind[rank])
        swift = min(known[-SWIFT:]) > FAR * bound
        stays = rank in state.since and middle > robust.STAYS * policy.least
        if middle > bound or swift or stays:
            bound = max(bound, deviations * OF_A_MEDIAN * robust.spread(known) / sqrt(len(known)))
            if swift or stays or (len(known) >= robust.LEAST and middle > bound):
                found[rank] = bound
    for ranks in _on_nodes(report, medians).values():
        if min(medians[rank] for rank in ranks) <= policy.least / 2:
            continue
        if bound := _together(ranks, state, medians, deviations, policy):
            found = dict.fromkeys(ranks, bound) | found
    return found


def _together(
    ranks: Sequence[int],
    state: State,
    medians: Mapping[int, float],
    deviations: float,
    policy: Policy,
) -> float:
    """The bound beyond which a node's ranks are slow together, as against all others; 0: they are not."""
    here = set(ranks)
    others = [middle for rank, middle in medians.items() if rank not in here]
    if not others or min(len(robust.known(state.behind[rank])) for rank in ranks) < robust.LEAST:
        return 0.0
    # Several at once vary less than each does.
    spread = robust.spread(_some(others)) / sqrt(len(ranks))
    bound = max(policy.least, deviations * spread * (1 + FEW / len(others)))
    behind = median_low([medians[rank] for rank in ranks]) - median_low(others)
    stays = here <= state.since.keys() and behind > robust.STAYS * policy.least
    return bound if behind > bound or stays else 0.0


def _some(values: Sequence[float]) -> Sequence[float]:
    """A part of them, where there are many."""
    return values[:: max(1, len(values) // SAMPLED)]


def _on_nodes(report: Report, medians: Mapping[int, float]) -> dict[str, list[int]]:
    """Ranks of nodes with several, of all of which something is known."""
    found: dict[str, list[int]] = {}
    for rank, seat in report.seats.items():
        found.setdefault(seat.node, []).append(rank)
    return {
        node: ranks
        for node, ranks in found.items()
        if len(ranks) > 1 and all(rank in medians for rank in ranks)
    }


def _since(state: State, rank: int, bound: float) -> Mark:
    """The end of the last interval before most were above half of `bound`."""
    above = [one > bound / 2 for one in state.behind[rank]]
    return state.since.get(rank) or state.marks[-robust.age(above) - 1]


def _now(state: State, rank: int) -> float:
    """By how much a slow rank is behind since it is."""
    later = sum(mark.at > state.since[rank].at for mark in state.marks)
    window = state.behind[rank]
    return median_low(robust.known(window[-later:]) or robust.known(window))


def _of_compute(
    state: State, medians: Mapping[int, float], report: Report, step: float, policy: Policy
) -> Iterable[Verdict]:
    """Slow ranks, and nodes all of whose ranks are, with what they cost."""
    if not state.since:
        return
    others: dict[str, float] = {}
    for rank, middle in medians.items():
        if rank not in state.since:
            peers = report.seats[rank].peers
            others[peers] = max(others.get(peers, 0.0), middle)
    usual = {
        peers: median_low([report.times[rank].compute for rank in ranks])
        for peers, ranks in _by_peers(report).items()
    }
    on = _on_nodes(report, medians)
    for node in sorted({report.seats[rank].node for rank in state.since}):
        slow = [rank for rank in state.since if report.seats[rank].node == node]
        whole = len(slow) == len(on.get(node, ()))
        for ranks in [slow] if whole else [[rank] for rank in slow]:
            seats = [(rank, report.seats[rank].peers) for rank in ranks]
            costs = [
                (medians[rank] - others.get(peers, 0.0)) * usual.get(peers, 0.0)
                for rank, peers in seats
            ]
            behind = median_low([medians[rank] for rank in ranks])
            since = min((state.since[rank] for rank in ranks), key=lambda mark: mark.at)
            yield _verdict(
                "node" if whole else "rank", ranks, [node], since, behind,
                max([0.0, *costs]), step, policy, devices.part(state.devices, ranks),
            )  # fmt: skip


# --- communication -------------------------------------------------------------------------------


def _with_groups(state: State, report: Report, step: float, policy: Policy) -> State:
    """Its groups with this interval's transfers. step: seconds."""
    took = dict.fromkeys((seat.group for seat in report.seats.values()), nan)
    for rank, times in report.times.items():
        group = report.seats[rank].group
        if isfinite(times.least):
            took[group] = min(times.least, took[group]) if isfinite(took[group]) else times.least
    least, deviations = policy.least * step, robust.deviations(policy.wrong, len(took))
    groups = {
        name: transfers.taken_in(
            state.groups.get(name, Group()), seconds, least=least, deviations=deviations
        )
        for name, seconds in took.items()
    }
    oldest = max((group.slow for group in groups.values()), default=0)
    began = (state.began or state.marks[-oldest - 1]) if oldest else None
    return replace(state, groups=groups, began=began)


def _of_links(state: State, report: Report, step: float, policy: Policy) -> Iterable[Verdict]:
    """The link that slow groups share, if compute is as it should be."""
    if state.since or state.began is None or _falls_behind(state, state.began, policy):
        return
    nodes: dict[str, set[str]] = {}
    for seat in report.seats.values():
        nodes.setdefault(seat.group, set()).add(seat.node)
    ends = transfers.ends(nodes, state.groups)
    worst = max((one for one in state.groups.values() if one.slow), key=lambda one: one.longer)
    ranks = [rank for rank, seat in report.seats.items() if state.groups[seat.group].slow]
    yield _verdict(
        "link" if ends else "communication", ranks, ends, state.began,
        worst.longer / worst.usual if worst.usual > 0 else 0.0, worst.longer, step, policy,
    )  # fmt: skip


def _falls_behind(state: State, since: Mark, policy: Policy) -> bool:
    """Whether anybody's compute grew, too, when transfers did. Who is without a processor sends late, and will be named for
    his compute; or, once a window has nothing of before, was not."""
    later = sum(mark.at > since.at for mark in state.marks)
    return any(
        median_low(now) - median_low(before) > policy.least / 2
        for window in state.behind.values()
        if (now := robust.known(window[-later:])) and (before := robust.known(window[:-later]))
    )


# --- both ----------------------------------------------------------------------------------------


def _verdict(
    kind: Kind,
    ranks: Iterable[int],
    nodes: Iterable[str],
    since: Mark,
    behind: float,
    cost: float,
    step: float,
    policy: Policy,
    part: Part = "",
) -> Verdict:
    share = cost / step if step > 0 else 0.0
    return Verdict(
        kind=kind, ranks=tuple(sorted(ranks)), nodes=tuple(nodes), since=since, behind=behind,
        cost=cost, share=share, pays=share * policy.horizon > policy.margin * policy.restart, part=part,
    )  # fmt: skip


def _by_peers(report: Report) -> dict[str, list[int]]:
    """Ranks that have told of their times, by whom they are compared with."""
    found: dict[str, list[int]] = {}
    for rank in report.times:
        found.setdefault(report.seats[rank].peers, []).append(rank)
    return found

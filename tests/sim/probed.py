"""Nodes, GPUs and links with hidden faults: what paired tests would say of them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.master.events import NodeId
from elastic.master.grouping import Group
from elastic.master.pair_results import (
    Account,
    Kind,
    Limits,
    Link,
    Outcome,
    Test,
    Verdict,
    link,
)
from elastic.master.pairing import Plan, Solo, decide

MATMUL = 0.010
GATHER = 0.100
"""Seconds, of healthy ones."""


@dataclass(kw_only=True)
class World:
    """What is at fault, which only the tests' results tell."""

    labels: dict[NodeId, str]
    gpus: int = 1
    """A node."""
    dead: set[NodeId] = field(default_factory=set)
    """Work with nobody."""
    slow_nodes: dict[NodeId, float] = field(default_factory=dict)
    """Times as long for an allgather with anybody."""
    broken_gpus: set[tuple[NodeId, int]] = field(default_factory=set)
    """Wrong checksums."""
    slow_gpus: dict[tuple[NodeId, int], float] = field(default_factory=dict)
    dead_links: set[Link] = field(default_factory=set)
    slow_links: dict[Link, float] = field(default_factory=dict)
    link_share: float = 0.0
    """Of the links, those faulty; each is drawn when it is first tested."""
    noise: float = 0.02
    """Standard deviation of times, of their own size."""
    hiccups: float = 0.0
    """Of the tests, those in which both times are half as long again."""
    far: float = 1.0
    """Times as long for an allgather between two labels."""
    seed: int = 0
    tested: set[Link] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, groups: Sequence[Group]) -> tuple[Test, ...]:
        """One round: each hub with each of its others."""
        tests: list[Test] = []
        busy: set[NodeId] = set()
        for group in groups:
            assert busy.isdisjoint(group.nodes), f"{group.nodes}: some are in two groups"
            busy.update(group.nodes)
            matmul = {node_id: self._matmul(node_id) for node_id in group.nodes}
            for a, b in group.pairs:
                assert a != b, f"{a} is paired with itself"
                tests.append(self._test(a, b, matmul))
        return tuple(tests)

    def _matmul(self, node_id: NodeId) -> tuple[float, ...]:
        return tuple(
            self._time(MATMUL * self.slow_gpus.get((node_id, gpu), 1.0)) for gpu in range(self.gpus)
        )

    def _test(self, a: NodeId, b: NodeId, matmul: dict[NodeId, tuple[float, ...]]) -> Test:
        which = link(a, b)
        self._draw(which)
        broken = {node: gpu for node, gpu in sorted(self.broken_gpus) if node in which}
        seconds = GATHER * self._times(which)
        accounts: list[Account] = []
        for node_id in (a, b):
            outcome, what, gather = Outcome.PASSED, "", self._time(seconds)
            if node_id in broken:
                outcome, what, gather = Outcome.FAILED_ALONE, "wrong checksum", 0.0
            elif broken or which in self.dead_links or self.dead & set(which):
                outcome, what, gather = Outcome.TIMED_OUT, "no answer", 0.0
            accounts.append(
                Account(
                    node_id=node_id,
                    outcome=outcome,
                    what=what,
                    gpu=broken.get(node_id),
                    matmul=matmul[node_id],
                    gather=gather,
                )
            )
        return Test(a=accounts[0], b=accounts[1])

    def _times(self, which: Link) -> float:
        times = max(self.slow_nodes.get(which[0], 1.0), self.slow_nodes.get(which[1], 1.0))
        times *= self.slow_links.get(which, 1.0)
        times *= self.far if self.labels[which[0]] != self.labels[which[1]] else 1.0
        return times * (1.5 if self._random.random() < self.hiccups else 1.0)

    def _draw(self, which: Link) -> None:
        if which not in self.tested and self._random.random() < self.link_share:
            if self._random.random() < 0.5:
                self.dead_links.add(which)
            else:
                self.slow_links[which] = self._random.uniform(1.8, 5.0)
        self.tested.add(which)

    def _time(self, seconds: float) -> float:
        return seconds * max(self._random.gauss(1.0, self.noise), 0.5)

    # --- what is true --------------------------------------------------------------------------

    @property
    def faulty_nodes(self) -> set[NodeId]:
        """By themselves, or a GPU of theirs."""
        gpus = {node_id for node_id, _ in (*self.broken_gpus, *self.slow_gpus)}
        return self.dead | set(self.slow_nodes) | gpus

    @property
    def faulty_links(self) -> set[Link]:
        return self.dead_links | set(self.slow_links)

    def wrong(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Those that blame what is healthy."""
        return [verdict for verdict in verdicts if not self._true(verdict)]

    def _true(self, verdict: Verdict) -> bool:
        if verdict.kind is Kind.LINK:
            return verdict.nodes in self.faulty_links or self._only_two(verdict.nodes)
        (node_id,) = verdict.nodes
        if verdict.kind is Kind.GPU:
            return (node_id, verdict.gpu) in {*self.broken_gpus, *self.slow_gpus}
        return node_id in self.faulty_nodes or self.cut_off(node_id)

    def _only_two(self, nodes: tuple[NodeId, ...]) -> bool:
        """The link is all that two nodes without others have: a card of either is a part of it."""
        return set(self.labels) - self._proved <= set(nodes) and bool(self._mute & set(nodes))

    def cut_off(self, node_id: NodeId) -> bool:
        """Healthy, but none of its links to healthy nodes is, or to those that only compute slowly where there are no
        healthy ones: the same to see as a faulty one."""
        unfit = self._mute | {broken for broken, _ in self.broken_gpus} | {node_id}
        others = self.labels.keys() - self.faulty_nodes - {node_id} or self.labels.keys() - unfit
        return bool(others) and all(link(node_id, other) in self.faulty_links for other in others)

    @property
    def _proved(self) -> set[NodeId]:
        """Whose own work shows it."""
        return {node_id for node_id, _ in (*self.broken_gpus, *self.slow_gpus)}

    @property
    def _mute(self) -> set[NodeId]:
        return self.dead | set(self.slow_nodes)

    @property
    def _compared(self) -> bool:
        """A link was tested that is as fast as it should be: others are slow beside it."""
        unfit = self._mute | {node_id for node_id, _ in self.broken_gpus}
        return any(
            which not in self.faulty_links and not unfit & set(which) for which in self.tested
        )

    def missed(self, verdicts: Sequence[Verdict]) -> set[tuple[NodeId, ...]]:
        """Faulty nodes, and faulty links between healthy nodes that were tested, of which none speaks.

        Not what has nothing to be compared with: slow ones without a fast one, slow links between racks.
        """
        named = {verdict.nodes for verdict in verdicts}
        ends = {node_id for nodes in named for node_id in nodes}
        nodes: set[tuple[NodeId, ...]] = {(node_id,) for node_id in self.faulty_nodes}
        if not self._compared:
            nodes -= {(node_id,) for node_id in self.slow_nodes}
        if len(self.labels.keys() - self._proved) == 2:  # the link's name is theirs
            nodes -= {(node_id,) for node_id in self._mute & ends}
        links: set[tuple[NodeId, ...]] = {
            which
            for which in self.faulty_links & self.tested
            if which in self.dead_links
            or (self._compared and self.labels[which[0]] == self.labels[which[1]])
            if not any(one in self.faulty_nodes or (one,) in named for one in which)
        }
        return (nodes | links) - named


def names(count: int) -> list[NodeId]:
    return [NodeId(f"n{number:04}") for number in range(count)]


def probe(
    world: World,
    solo: dict[NodeId, Solo] | None = None,
    limits: Limits | None = None,
    turn: int = 0,
) -> tuple[Plan, int]:
    """Rounds until nothing more is to be tested; how many there were. turn: as of `decide`."""
    limits = limits or Limits()
    rounds: list[tuple[Test, ...]] = []
    while True:
        plan = decide(world.labels, solo or {}, rounds, limits, turn)
        assert plan.reason
        if not plan.groups:
            return plan, len(rounds)
        assert len(rounds) < limits.rounds, "a round too many was asked for"
        rounds.append(world.run(plan.groups))


def spoiled(count: int, nodes: float, links: float, seed: int, racks: int = 0) -> World:
    """Faults at random: shares of the nodes, in equal parts of each kind, and of the links tested."""
    chance = random.Random(seed)
    ids = names(count)
    world = World(
        labels={node_id: f"rack{chance.randrange(racks)}" if racks else "" for node_id in ids},
        gpus=chance.choice((1, 8)),
        link_share=links,
        seed=seed + 1,
    )
    for node_id in chance.sample(ids, min(max(round(nodes * count), nodes > 0), count)):
        gpu = (node_id, chance.randrange(world.gpus))
        match chance.randrange(4):
            case 0:
                world.dead.add(node_id)
            case 1:
                world.slow_nodes[node_id] = chance.uniform(1.8, 5.0)
            case 2:
                world.broken_gpus.add(gpu)
            case _:
                world.slow_gpus[gpu] = chance.uniform(1.4, 3.0)
    return world

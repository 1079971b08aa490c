"""Saves, replicas, flushes and the deaths of nodes, in any order: what was replicated once is never
gone back behind, and no save waits for ever."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from elastic.agent.snapshots.checkpoint import Checkpoint as Known
from elastic.agent.snapshots.checkpoint import moment_of
from elastic.agent.snapshots.flushes import Flushes
from elastic.agent.snapshots.memory import COPIES, REPLICATED
from elastic.agent.snapshots.shelf import Slots
from elastic.checkpoint.save.slots import Content, reusable
from elastic.master import checkpoints as core
from elastic.master import messages
from elastic.master.checkpoints import Checkpoint, Orders
from elastic.master.events import Incarnation, NodeId
from elastic.master.holdings import Holding, Looked, Member, Restore, Said
from elastic.proto import master_pb2 as pb
from elastic.proto.moment import Moment
from tests.agent.snapshots.test_snapshots import settings

WORLD = 3
FLUSHES = Flushes(settings(), "c", lambda: None)
"""Nothing is written here."""
LIFE = Incarnation(1)


@dataclass(slots=True)
class Rank:
    """What it knows; its slots are its node's."""

    step: int = 0
    loaded: Moment | None = None
    keep: frozenset[Moment] = frozenset()


@dataclass(slots=True)
class Node:
    """One rank, its slots, and the replicas of another's; what it knows is what its agent would."""

    name: NodeId
    own: list[Moment | None] = field(default_factory=lambda: [None] * REPLICATED)
    copies: dict[int, list[Moment]] = field(default_factory=dict[int, list[Moment]])
    known: Known = field(default_factory=lambda: Known(name="c", slots=Slots(), flushes=FLUSHES))
    all_units: dict[Moment, int] = field(default_factory=dict[Moment, int])
    """As its slots say, of the moments that it knows to be whole."""
    orders: deque[pb.SnapshotOrders] = field(default_factory=deque[pb.SnapshotOrders])
    fetch: dict[tuple[Moment, int], str] = field(default_factory=dict[tuple[Moment, int], str])
    unfit: set[Moment] = field(default_factory=set[Moment])
    pinned: int | None = None
    """The slot that is being flushed."""
    unread: deque[frozenset[Moment]] = field(default_factory=deque[frozenset[Moment]])
    """What its rank was told to keep."""
    rank: Rank = field(default_factory=Rank)

    def images(self, rank: int) -> dict[Moment, set[int]]:
        found: dict[Moment, set[int]] = {at: {rank} for at in self.own if at is not None}
        for other, moments in self.copies.items():
            for at in moments:
                found.setdefault(at, set()).add(other)
        return found

    def obey(self, order: pb.SnapshotOrders) -> None:
        self.known.learn(order)
        self.all_units[moment_of(self.known.whole)] = self.known.all_units
        self.unread.append(self.known.keep)
        if order.HasField("restore"):
            self.known.answer = order.restore
        self.fetch = {}
        for one in order.fetch:
            at = moment_of(one.moment)
            self.all_units[at] = one.all_units
            if at not in self.copies.get(one.rank, ()) and at not in self.unfit:
                self.fetch[at, one.rank] = one.base

    def room(self, rank: int) -> bool:
        """For one more replica, in place of what has had its time."""
        moments = self.copies.setdefault(rank, [])
        if len(moments) < COPIES:
            return True
        spent = [at for at in moments if at not in self.known.lasting]
        if spent:
            moments.remove(spent[0])
        return bool(spent)


class Job:
    def __init__(self) -> None:
        self.names = (NodeId(f"n{number:02}") for number in count())
        self.nodes = [Node(next(self.names)) for _ in range(WORLD)]
        self.state = Checkpoint()
        self.round = 1
        self.kept: Moment | None = None
        """What the loss of any one node must leave."""

    @property
    def members(self) -> list[Member]:
        return [Member(node.name, range(i, i + 1)) for i, node in enumerate(self.nodes)]

    def hear(self, index: int, asks: int = 0, looked: Looked | None = None) -> None:
        node = self.nodes[index]
        holdings = {
            at: Holding(
                world_size=WORLD,
                ranks=frozenset(ranks),
                units=frozenset(ranks),
                all_units=node.all_units.get(at, 0),
            )
            for at, ranks in node.images(index).items()
        }
        said = Said(
            node_id=node.name, incarnation=LIFE, holdings=holdings, asks=asks, base=node.name,
            replicas=True, unfit=frozenset(node.unfit), answer=self.answer(node), looked=looked,
        )  # fmt: skip
        self.state = core.hear(self.state, said)

    def decide(self) -> Orders:
        self.state, orders = core.decide(self.state, self.round, self.members)
        replicated = self.state.replicated
        if replicated is not None and replicated.round == self.round:
            self.kept = replicated
        for node in self.nodes:
            order = messages.snapshot_orders("c", orders)
            messages.own_part(node.name, orders, self.state.said, order)
            node.orders.append(order)
        return orders

    def answer(self, node: Node) -> Restore | None:
        told = node.known.answer
        return None if told is None else messages._restore(told)

    # --- what happens ---

    def save(self, index: int) -> bool:
        node, rank = self.nodes[index], self.nodes[index].rank
        while node.unread:
            rank.keep = node.unread.popleft()
        free = self.free(index)
        for slot in free:
            if slot != node.pinned:
                rank.step += 1
                node.own[slot] = Moment(self.round, rank.step)
                return True
        return False

    def free(self, index: int) -> list[int]:
        node, rank = self.nodes[index], self.nodes[index].rank
        keep = node.unread[-1] if node.unread else rank.keep
        contents = [
            Content(moment=at, whole=at is not None and at in node.all_units) for at in node.own
        ]
        return reusable(contents, self.round, rank.loaded, keep)

    def tell(self, index: int) -> None:
        self.hear(index)
        self.decide()

    def obey(self, index: int) -> None:
        if self.nodes[index].orders:
            self.nodes[index].obey(self.nodes[index].orders.popleft())

    def copy(self, index: int) -> None:
        node = self.nodes[index]
        for (at, rank), source in list(node.fetch.items()):
            there = [n for n in self.nodes if n.name == source]
            if there and at in there[0].images(self.nodes.index(there[0])):
                if node.room(rank):
                    node.copies[rank].append(at)
                    del node.fetch[at, rank]
            else:
                node.unfit.add(at)
                del node.fetch[at, rank]

    def step(self, index: int) -> None:
        """All save, `index` first, and hear of it; no copy is made."""
        for each in (*range(index, WORLD), *range(index)):
            self.save(each)
            self.tell(each)
        for each in range(WORLD):
            while self.nodes[each].orders:
                self.obey(each)

    def pin(self, index: int) -> None:
        """A flush begins, or ends."""
        node = self.nodes[index]
        whole = moment_of(node.known.whole)
        if node.pinned is None and whole in node.own:
            node.pinned = node.own.index(whole)
        else:
            node.pinned = None

    def restart_master(self, index: int) -> None:
        self.state = Checkpoint()
        for node in self.nodes:
            node.orders.clear()
        for each in range(WORLD):
            self.hear(each)
        self.decide()

    def lose(self, index: int) -> None:
        """A node, memory and all; another comes, and all load."""
        reached = max((node.rank.step for node in self.nodes), default=0)
        self.state = core.forget(self.state, self.nodes[index].name, LIFE)
        self.nodes[index] = Node(next(self.names))
        self.round += 1
        for each, node in enumerate(self.nodes):
            node.orders.clear()
            node.unread.clear()
            node.pinned = None
            self.hear(each, asks=self.round)
        orders = self.decide()
        if orders.look is not None:  # there is never anything on storage here
            name, look = orders.look
            for node in self.nodes:
                node.orders.clear()
            (zero,) = [each for each, node in enumerate(self.nodes) if node.name == name]
            self.hear(zero, asks=self.round, looked=Looked(look=look))
            orders = self.decide()
        assert orders.restore is not None, orders.reason
        at = orders.restore.moment
        assert at is None or orders.restore.from_memory, orders.reason
        if self.kept is not None:
            assert at is not None, f"{self.kept} was replicated"
            assert at >= self.kept
            assert at.step <= reached
        self.kept = None
        for each, node in enumerate(self.nodes):
            if at is not None:
                there = {r for i, n in enumerate(self.nodes) for r in n.images(i).get(at, ())}
                assert there == set(range(WORLD)), f"{at} is not there"
            node.unread.append(node.known.keep)  # a rank that opens is told
            node.rank = Rank(step=0 if at is None else at.step, loaded=at)
            self.obey(each)

    def settle(self) -> None:
        """Every message arrives, every copy is made, until there is nothing more to say."""
        for _ in range(20):
            before = self.state
            for index in range(WORLD):
                self.tell(index)
                while self.nodes[index].orders:
                    self.obey(index)
                self.copy(index)
            if self.state == before:
                return
        raise AssertionError("they never come to rest")


ACTIONS = {
    "step": Job.step,
    "save": Job.save,
    "tell": Job.tell,
    "obey": Job.obey,
    "copy": Job.copy,
    "pin": Job.pin,
    "restart_master": Job.restart_master,
    "lose": Job.lose,
}
OFTEN = (
    ["step"] * 5
    + ["save"] * 5
    + ["tell", "obey"] * 5
    + ["copy"] * 3
    + ["pin", "restart_master", "lose"]
)
moves = st.tuples(st.sampled_from(OFTEN), st.integers(0, WORLD - 1))


def run(job: Job, schedule: Iterable[tuple[str, int]]) -> None:
    for action, index in schedule:
        ACTIONS[action](job, index)


@examples(max_examples=30)
@given(st.lists(moves, max_size=120))
def test_what_was_replicated_outlives_any_one_node_and_no_save_waits_for_ever(
    schedule: list[tuple[str, int]],
) -> None:
    job = Job()
    run(job, schedule)
    for _ in range(2 * REPLICATED):
        job.settle()
        for node in job.nodes:
            node.pinned = None
        last = min(range(WORLD), key=lambda index: job.nodes[index].rank.step)
        before = job.state.replicated
        assert job.save(last), f"rank {last} waits: {job.nodes[last]}"
    job.settle()
    assert job.state.replicated is not None
    assert before is not None
    assert job.state.replicated.round == job.round, "replication goes on in the new round"


@examples(max_examples=20)
@given(st.lists(moves, max_size=60), st.integers(0, WORLD - 1))
def test_with_replicas_of_each_step_one_at_most_is_lost(
    schedule: list[tuple[str, int]], lost: int
) -> None:
    job = Job()
    run(job, schedule)
    job.settle()
    for _ in range(WORLD * 2):
        last = min(range(WORLD), key=lambda index: job.nodes[index].rank.step)
        for node in job.nodes:
            node.pinned = None
        assert job.save(last)
        job.settle()
    done = min(node.rank.step for node in job.nodes)
    job.lose(lost)
    assert job.nodes[lost].rank.step >= done


@pytest.mark.parametrize("late", range(2 * REPLICATED))
def test_copies_that_are_late_take_nothing_from_what_was_replicated(late: int) -> None:
    """Whoever copies meanwhile, and whoever is lost."""
    for copies, lost in product([None, *range(WORLD)], range(WORLD)):
        job = Job()
        job.step(0)
        job.settle()
        for _ in range(late):
            job.step(lost)
            if copies is not None:
                job.copy(copies)
        replicated = job.state.replicated
        assert replicated is not None
        job.lose(lost)
        assert job.nodes[lost].rank.step >= replicated.step

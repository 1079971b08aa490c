"""Ranks on their way out of a round: they end up in one save, whatever comes late and whoever runs ahead.

The model has the real rules of master, agent and rank, and messages that take as long as they like on
each of their ways, in their order. Ranks need one another: none finishes a step before all have begun it.
"""

import copy
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.agent.snapshots.leaving import Leaving as Node
from elastic.master import leaving as core
from elastic.master.events import NodeId
from elastic.master.leaving import Leaving, Stand
from elastic.proto import keeper
from elastic.proto import master_pb2 as pb

A, B = NodeId("a"), NodeId("b")


def test_where_all_wait_at_once() -> None:
    state = core.begin(5, 8)
    for node in (A, B):
        assert not core.met(state, 2)
        state = core.hear(state, node, Stand(order=5, next=8, waits=8))
    assert core.met(state, 2) == 8
    assert not core.met(state, 3), "a third has not answered"
    assert not core.met(core.forget(state, A), 2)


def test_a_rank_that_has_passed_it_moves_it_on() -> None:
    state = core.begin(5, 8)
    state = core.hear(state, A, Stand(order=5, next=8, waits=8))
    state = core.hear(state, B, Stand(order=5, next=11))
    assert (state.order, state.step) == (6, 11)
    state = core.hear(state, B, Stand(order=6, next=11, waits=11))
    assert not core.met(state, 2), "the other one answers an order that holds no more"
    state = core.hear(state, B, Stand(order=6, next=12))
    assert (state.order, state.step) == (7, 13), "each time a step more"


def test_where_what_all_wait_in_is_never_whole_they_leave_in_the_next() -> None:
    state = core.begin(5, 8)
    for node in (A, B):
        state = core.hear(state, node, Stand(order=5, next=8, waits=12))
    state = core.further(state, core.met(state, 2))
    assert (state.order, state.step, core.met(state, 2)) == (6, 13, 0)
    state = core.hear(state, A, Stand(order=6, next=13))
    assert (state.order, state.step) == (6, 13), "who goes on from there is not late"


def test_a_node_says_why_its_step_is_not_kept() -> None:
    node = Node(1, order=pb.Leave(order=5, step=8))
    node.hear(0, keeper.Saved(step=8, waits=5))
    node.hear(1, keeper.Saved(step=8, waits=5, lost="no space"))
    assert not node.stand("c", 3).lost, "not all wait yet"
    told = node.stand("c", 2)
    assert (told.waits, told.lost) == (8, "no space")
    state = core.hear(core.begin(5, 8), A, Stand(order=5, next=8, waits=8))
    assert not core.lost(state)
    assert core.lost(core.hear(state, B, Stand(order=5, next=8, waits=8, lost="full"))) == "full"


@dataclass
class Rank:
    """A process that computes and saves, as `Keeping.stay` does."""

    every: int
    step: int = 0
    """Saved."""
    begun: int = 0
    """The step that it computes."""
    leave: keeper.Leave = field(default_factory=keeper.Leave)
    waits: bool = False
    inbox: deque[keeper.Leave] = field(default_factory=deque)
    outbox: deque[keeper.Saved] = field(default_factory=deque)

    def stay(self) -> None:
        self.waits = 0 < self.leave.step <= self.step
        self.outbox.append(
            keeper.Saved(step=self.step, waits=self.leave.order if self.waits else 0)
        )

    def hear(self) -> None:
        """One message; only at the end of a save."""
        self.leave = self.inbox.popleft()
        self.stay()


class World:
    """Nodes of one rank each, and a master; a move is one message that arrives, or one rank's progress."""

    def __init__(self, ranks: int, every: int, *, coupled: bool) -> None:
        self.ranks = [Rank(every) for _ in range(ranks)]
        self.nodes = [Node(1) for _ in range(ranks)]
        self.down: list[deque[pb.Leave]] = [deque() for _ in range(ranks)]
        self.up: list[deque[pb.Stand]] = [deque() for _ in range(ranks)]
        self.leaving: Leaving | None = None
        self.order = 0
        self.coupled = coupled

    def copy(self) -> "World":
        """One that can go another way."""
        other = copy.copy(self)
        other.ranks = [replace(r, inbox=deque(r.inbox), outbox=deque(r.outbox)) for r in self.ranks]
        other.nodes = [replace(n, waiting=dict(n.waiting)) for n in self.nodes]
        other.down = [deque(way) for way in self.down]
        other.up = [deque(way) for way in self.up]
        return other

    # --- what may happen next ---

    def moves(self) -> Iterator[tuple[str, int]]:
        for i, rank in enumerate(self.ranks):
            if rank.outbox:
                yield "keeper", i
            if rank.waits and rank.inbox:
                yield "hear", i
            if not rank.waits and self.can_go(rank):
                yield "go", i
            if self.down[i]:
                yield "agent", i
            if self.up[i]:
                yield "master", i

    def can_go(self, rank: Rank) -> bool:
        """Begin a step, or end one that all have begun."""
        if rank.begun == rank.step:
            return True
        return not self.coupled or all(r.begun >= rank.begun for r in self.ranks)

    def make(self, move: str, i: int) -> None:
        rank, node = self.ranks[i], self.nodes[i]
        if move == "go" and rank.begun == rank.step:
            rank.begun += 1
        elif move == "go":
            rank.step = rank.begun
            if rank.step % rank.every == 0:
                while rank.inbox:
                    rank.leave = rank.inbox.popleft()
                rank.stay()
        elif move == "hear":
            rank.hear()
        elif move == "keeper":
            saved = rank.outbox.popleft()
            node.hear(0, saved)
            if node.order.step:
                self.up[i].append(node.stand("c", 1))
        elif move == "agent":
            node.order = self.down[i].popleft()
            rank.inbox.append(keeper.Leave(order=node.order.order, step=node.order.step))
            self.up[i].append(node.stand("c", 1))
        elif move == "master":
            told = self.up[i].popleft()
            if self.leaving is not None:
                stand = Stand(order=told.order, next=told.next, waits=told.waits)
                before, name = self.leaving, NodeId(str(i))
                self.leaving = core.hear(before, name, stand)
                if self.leaving.order != before.order:
                    self.tell(self.leaving.order, self.leaving.step)

    # --- the master ---

    def begin(self, known: int) -> None:
        self.leaving = core.begin(self.order + 1, known)
        self.tell(self.leaving.order, self.leaving.step)

    def withdraw(self) -> None:
        self.leaving = None
        self.tell(self.order + 1, 0)

    def tell(self, order: int, step: int) -> None:
        self.order = order
        for way in self.down:
            way.append(pb.Leave(order=order, step=step))

    def met(self) -> int:
        return 0 if self.leaving is None else core.met(self.leaving, len(self.ranks))

    def check(self) -> bool:
        """Whether all have met; then it is true of all of them."""
        step = self.met()
        if step:
            assert all(r.waits and (r.step, r.begun) == (step, step) for r in self.ranks), (
                "one of them goes on"
            )
            assert all(r.leave.order == self.order for r in self.ranks)
        return bool(step)

    def key(self) -> tuple[object, ...]:
        """All that decides what follows."""
        ranks = tuple(
            (r.step, r.begun, r.waits, r.leave.order, r.leave.step, *r.inbox, 0, *r.outbox)
            for r in self.ranks
        )
        nodes = tuple(
            (n.order.order, n.order.step, n.next, *n.waiting.values()) for n in self.nodes
        )
        ways = tuple(
            (*((m.order, m.step) for m in down), 0, *((m.order, m.next, m.waits) for m in up))
            for down, up in zip(self.down, self.up, strict=True)
        )
        left = self.leaving
        master = left and (left.order, left.step, left.moves, left.next, *left.stands.items())
        return ranks, nodes, ways, master


def run(world: World, choices: Iterator[int], most: int) -> None:
    """Make moves, in turns so that none is put off for ever, until all have met."""
    waited: dict[tuple[str, int], int] = {}
    for _ in range(most):
        if world.check():
            return
        moves = list(world.moves())
        assert moves, "they wait for ever"
        waited = {move: waited.get(move, 0) + 1 for move in moves}
        late = [move for move in moves if waited[move] > 20]
        chosen = (late or moves)[next(choices) % len(late or moves)]
        del waited[chosen]
        world.make(*chosen)
    raise AssertionError("they never met")


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 1, 2, 3]),
    st.booleans(),
    st.integers(0, 60),
    st.integers(0, 4),
    st.lists(st.integers(0, 40), max_size=2),
    st.randoms(use_true_random=False),
)
def test_ranks_meet_in_one_save_whatever_the_order_of_things(
    ranks: int,
    every: int,
    coupled: bool,
    before: int,
    known: int,
    withdrawn: list[int],
    chance: random.Random,
) -> None:
    world = World(ranks, every, coupled=coupled)
    choices = iter(lambda: chance.randrange(1 << 16), -1)

    def some(count: int) -> None:
        for _ in range(count):
            moves = list(world.moves())
            world.make(*moves[next(choices) % len(moves)])
            if world.check():
                return

    some(before)
    for count in withdrawn:
        world.begin(1 + known)
        some(count)
        world.withdraw()
        some(count)
    world.begin(1 + known)
    run(world, choices, 4000)


@pytest.mark.parametrize("passed", [0, 1])
def test_two_ranks_in_every_order_of_things(passed: int) -> None:
    """From the moment of the order on, up to some steps beyond it: they meet, and never get stuck.

    passed: how many steps they have saved that the master has not heard of. What a rank says is with its
    agent at once, to have fewer orders.
    """
    first = World(2, 1, coupled=True)
    for _ in range(passed):
        for what in ("go", "go", "keeper"):
            for rank in (0, 1):
                first.make(what, rank)
    first.begin(1)
    seen = {first.key()}
    ahead = [first]
    met = 0
    while ahead:
        world = ahead.pop()
        if world.check():
            met += 1
            continue
        moves = list(world.moves())
        assert moves, "they wait for ever"
        at_once = [move for move in moves if move[0] == "keeper"]
        for move in at_once[:1] or moves:
            after = world.copy()
            after.make(*move)
            if max(r.step for r in after.ranks) <= 2 and after.key() not in seen:
                seen.add(after.key())
                ahead.append(after)
    assert met

"""Slots and replicas of a node, as its agent keeps them: two agents side by side, real couriers between
them, and a test in the place of ranks and master."""

import asyncio
import contextlib
import mmap
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.settings import AgentSettings, LogSettings, Workload
from elastic.agent.snapshots import flushes as flushing
from elastic.agent.snapshots import memory
from elastic.agent.snapshots.shelf import Slot
from elastic.agent.snapshots.snapshots import Snapshots
from elastic.agent.snapshots.vault import Vault
from elastic.proto import flusher, keeper, slot, sums
from elastic.proto import master_pb2 as pb
from elastic.proto.moment import Moment
from elastic.proto.security import Security
from elastic.proto.sums import Chunk
from elastic.proto.terms import Retention, Terms
from tests.master.serving import within

NAME = "/data/run"
SIZE = 1 << 16


def settings(*, several_nodes: bool = True) -> AgentSettings:
    work = Workload(
        kind="script", entry="/", python=sys.executable, environ=dict(os.environ), cwd="/"
    )
    return AgentSettings(
        run_id="job", node_id="node", slots=1, master="", host="127.0.0.1", workload=work,
        several_nodes=several_nodes, logs=LogSettings(run_dir=None), security=Security(),
    )  # fmt: skip


class Rank:
    """A checkpointer, by hand."""

    def __init__(
        self, node: "Node", rank: int, round_: int, world: int, local: int, of: int, **more: Any
    ) -> None:
        self.rank, self.round, self.world, self.local, self.of = rank, round_, world, local, of
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.setblocking(False)
        self.fds: list[int] = []
        self.generation = 0
        self.closed = node.snapshots.open(theirs, round_)
        self.tell(
            keeper.opening(
                terms=more.pop("terms", Terms()),
                checkpoint=more.pop("name", NAME),
                rank=rank,
                world_size=world,
                local_rank=local,
                local_world_size=of,
                **more,
            )
        )

    def tell(self, message: keeper.ToKeeper) -> None:
        keeper.send(self.end, message)

    async def hear(self) -> tuple[keeper.ToRank, list[int]] | None:
        while True:
            try:
                return keeper.receive_from_keeper(self.end)
            except BlockingIOError:
                await readable(self.end)

    async def told(self, kind: type) -> keeper.ToRank:
        """The next message of that kind."""
        while (found := await self.hear()) is not None:
            if isinstance(found[0], kind):
                self.fds += found[1]
                return found[0]
        raise AssertionError("cut off")

    async def slots(self) -> None:
        self.tell(keeper.Need(bytes=SIZE))
        await self.told(keeper.Slots)

    def save(
        self, index: int, step: int, persist: bool = False, beliefs: tuple[slot.Belief, ...] = ()
    ) -> bytes:
        data = bytes([self.rank, step % 256]) * 1000
        view = memoryview(mmap.mmap(self.fds[index], 0))
        self.generation += 1
        stamp = slot.Stamp(
            job="j", step=step, round=self.round, rank=self.rank, world_size=self.world,
            generation=self.generation, local_rank=self.local, local_world_size=self.of,
            persist=persist,
        )  # fmt: skip
        writing = slot.Writing(view, stamp, len(data) + sums.ENTRY, 1)
        writing.image[: len(data)] = data
        writing.commit([Chunk(len(data), sums.checksum(data))], (self.rank,), beliefs)
        self.tell(keeper.Held())
        return data

    def close(self) -> None:
        self.end.close()
        for fd in self.fds:
            os.close(fd)


async def readable(end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(end, seen.set)
    try:
        await seen.wait()
    finally:
        loop.remove_reader(end)


class Node:
    """An agent's part in it; `again` is its next life."""

    def __init__(self, vault: Vault, *, several_nodes: bool = True) -> None:
        self.vault = vault
        self.said: list[pb.Snapshots] = []
        self.news = asyncio.Event()
        self.ranks: list[Rank] = []
        self.snapshots = Snapshots(
            settings(several_nodes=several_nodes), vault, lambda: "job", self._say
        )

    def _say(self, told: pb.Snapshots | pb.Stand) -> None:
        assert isinstance(told, pb.Snapshots)  # nobody has its ranks leave
        self.said.append(told)
        self.news.set()

    def opens(
        self,
        rank: int,
        *,
        round_: int = 1,
        world: int = 2,
        local: int = 0,
        of: int = 1,
        **more: Any,
    ) -> Rank:
        self.ranks.append(Rank(self, rank, round_, world, local, of, **more))
        return self.ranks[-1]

    async def says(self, what: Callable[[pb.Snapshots], object]) -> pb.Snapshots:
        """The first statement of which that is so."""
        while True:
            for told in self.said:
                if what(told):
                    return told
            self.news.clear()
            await self.news.wait()

    def holds(self, moment: Moment, *ranks: int) -> Callable[[pb.Snapshots], bool]:
        return lambda told: any(
            (h.moment.round, h.moment.step) == moment and set(ranks) <= set(h.ranks)
            for h in told.holdings
        )

    @property
    def base(self) -> str:
        return self.snapshots.statements()[0].base

    def slots(self, kind: str) -> dict[str, Slot]:
        slots = self.snapshots._shelf.of(NAME)
        owners = slots.own if kind == "own" else slots.copy
        return {one.name: one for found in owners.values() for one in found}

    def courier(self) -> int:
        (pid,) = self.snapshots._replicas.pids
        return pid

    def end(self) -> None:
        """Of this life; what is kept stays."""
        for rank in self.ranks:
            rank.close()
        for client in list(self.snapshots._of(NAME).clients):
            client.close()
        self.snapshots.kill()
        for side in (self.snapshots._replicas._side, self.snapshots._of(NAME).flushes._side):
            if side._process is not None:
                side._process.wait()
            if side._end is not None:
                asyncio.get_running_loop().remove_reader(side._end)
                side._end.close()
        if self.snapshots._replicas._listener is not None:
            self.snapshots._replicas._listener.close()


@contextlib.asynccontextmanager
async def nodes(count: int, *, several_nodes: bool = True) -> AsyncIterator[list[Node]]:
    vaults = [Vault() for _ in range(count)]
    made = [Node(vault, several_nodes=several_nodes) for vault in vaults]
    try:
        yield made
    finally:
        for node in made:
            node.end()
        for vault in vaults:
            for fd in vault.kept.values():
                os.close(fd)
            vault._guardian.close()
            vault._agent.close()


def order(
    *, whole: Moment | None = None, keep: tuple[Moment, ...] = (), fetch: tuple[pb.Fetch, ...] = ()
) -> pb.SnapshotOrders:
    return pb.SnapshotOrders(
        checkpoint=NAME,
        whole=None if whole is None else pb.Moment(round=whole.round, step=whole.step),
        all_units=2,
        keep=[pb.Moment(round=at.round, step=at.step) for at in keep],
        fetch=fetch,
    )


def copy_of(moment: Moment, rank: int, base: str) -> pb.Fetch:
    at = pb.Moment(round=moment.round, step=moment.step)
    return pb.Fetch(moment=at, rank=rank, base=base, slot_bytes=SIZE, all_units=2)


async def saved(node: Node, rank: int, *steps: int, round_: int = 1) -> Rank:
    """A rank that has saved these, the first in its first slot."""
    made = node.opens(rank, round_=round_)
    await made.slots()
    for index, step in enumerate(steps):
        made.save(index, step)
        await node.says(node.holds(Moment(round_, step), rank))
    return made


FIVE, SIX, SEVEN = Moment(1, 5), Moment(1, 6), Moment(1, 7)


@within(60)
async def test_a_replica_is_made_adopted_by_the_next_life_and_served_by_it() -> None:
    async with nodes(3) as (a, b, c):
        rank = await saved(a, 0, 5)
        await saved(b, 1, 5)
        b.snapshots.obey(order(whole=FIVE, keep=(FIVE,), fetch=(copy_of(FIVE, 0, a.base),)))
        told = await b.says(b.holds(FIVE, 0, 1))
        assert told.holdings[0].all_units == 2
        b.end()
        b.__init__(b.vault)  # type: ignore[misc]
        (again,) = b.snapshots.statements()
        assert b.holds(FIVE, 0, 1)(again)
        assert not again.base, "its courier has not been told all yet"
        await asyncio.sleep(0)
        assert b.base
        rank.save(0, 6)  # the first is no more
        c.snapshots.obey(order(keep=(FIVE,), fetch=(copy_of(FIVE, 0, b.base),)))
        await c.says(c.holds(FIVE, 0))


@within(60)
async def test_where_no_other_node_can_come_nothing_is_served() -> None:
    async with nodes(1, several_nodes=False) as (a,):
        await saved(a, 0, 5)
        assert (a.base, a.snapshots.pids) == ("", set())


@within(60)
async def test_a_courier_that_dies_is_told_all_again(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes(2) as (a, b):
        await saved(a, 0, 5)
        await saved(b, 1, 5)
        for node in (a, b):
            os.kill(node.courier(), 9)
        b.snapshots.obey(order(whole=FIVE, keep=(FIVE,), fetch=(copy_of(FIVE, 0, a.base),)))
        await b.says(b.holds(FIVE, 0, 1))
        assert not b.snapshots._replicas.unfit
    assert "the courier died and is started again" in caplog.text


@within(60)
async def test_what_cannot_be_copied_is_said_until_nobody_wants_it() -> None:
    async with nodes(2) as (a, b):
        await saved(a, 0, 5, 6)
        b.snapshots.obey(order(keep=(SEVEN,), fetch=(copy_of(SEVEN, 0, a.base),)))
        told = await b.says(lambda told: told.unfit)
        assert [(at.round, at.step) for at in told.unfit] == [SEVEN]
        b.snapshots.obey(order(keep=(SIX,), fetch=(copy_of(SIX, 0, a.base),)))
        told = await b.says(b.holds(SIX, 0))
        assert not told.unfit


@within(60)
async def test_what_ranks_do_not_trust_is_told_once_before_they_are_answered() -> None:
    async with nodes(1) as (a,):
        doubt = keeper.Doubted(after=4, ranks=(1,), what="rank 1 differs")
        for rank in (a.opens(0, of=2), a.opens(1, local=1, of=2)):
            rank.tell(replace(doubt, question=7))
            assert await rank.told(keeper.Noted) == keeper.Noted(question=7)
            told = pb.Doubt(round=1, after=4, ranks=[1], what="rank 1 differs")
            assert list(a.said[-1].doubts) == [told]
        again = a.opens(0, round_=2)
        again.tell(keeper.Load())
        assert not (await a.says(lambda told: told.asks == 2)).doubts, (
            "they are of the round before"
        )
        again.tell(replace(doubt, after=-1))
        assert await again.hear() is None, "it is cut off"


@within(60)
async def test_what_others_write_is_waited_for_as_long_as_a_master_hears_of_it() -> None:
    async with nodes(1) as (a,):
        await saved(a, 0, 5)
        a.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, pending=True))
        persisted = asyncio.create_task(a.snapshots.persisted(600))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not persisted.done()
        a.snapshots.unheard()
        await persisted


@within(60)
async def test_no_memory_for_a_replica_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes(1) as (a,):
        fetch = copy_of(FIVE, 0, "http://127.0.0.1:9/x")
        fetch.slot_bytes = 1 << 50
        a.snapshots.obey(order(keep=(FIVE,), fetch=(fetch,)))
        await a.says(lambda told: told.unfit)
        assert not a.slots("copy")
    assert "no memory for a replica" in caplog.text


@within(60)
async def test_replicas_go_once_what_replaces_them_is_there() -> None:
    async with nodes(2) as (a, b):
        await saved(a, 0, 5, 6)
        base = a.base
        b.snapshots.obey(order(keep=(FIVE,), fetch=(copy_of(FIVE, 0, base),)))
        await b.says(b.holds(FIVE, 0))
        b.snapshots.obey(order())
        assert b.holds(FIVE, 0)(b.snapshots.statements()[0]), "orders without `keep` change nothing"
        b.snapshots.obey(order(keep=(FIVE, SIX), fetch=(copy_of(SIX, 0, base),)))
        await b.says(b.holds(SIX, 0))
        assert len(b.slots("copy")) == 2
        b.snapshots.obey(order(keep=(SIX, SEVEN), fetch=(copy_of(SEVEN, 9, base),)))
        b.snapshots.obey(order(keep=(SEVEN,)))
        assert [one.moment for one in b.slots("copy").values()] in ([], [None])


@within(60)
async def test_slots_of_ranks_that_are_no_more_are_given_back_once_newer_is_whole() -> None:
    async with nodes(1) as (a,):
        for local in range(2):
            rank = a.opens(local, local=local, of=2)
            await rank.slots()
            rank.save(0, 5)
            rank.save(1, 6, persist=True)
        await a.says(a.holds(SIX, 0, 1))
        a.snapshots.obey(order(whole=SIX, keep=(FIVE,)))
        alone = a.opens(0, round_=2, world=1)
        await alone.slots()
        beyond = [one for name, one in a.slots("own").items() if "/own/1/" in name]
        assert sorted(one.moment or FIVE for one in beyond if one.moment) == [FIVE, SIX]
        later = Moment(2, 7)
        alone.save(0, 7)
        await a.says(a.holds(later, 0))
        a.snapshots.obey(order(whole=later))
        left = [one.moment for name, one in a.slots("own").items() if "/own/1/" in name]
        assert left == [FIVE, SIX], "what is kept, and what is to be written"
        a.snapshots.obey(order(whole=later, keep=(later,)))
        left = [one.moment for name, one in a.slots("own").items() if "/own/1/" in name]
        assert left == [SIX]


# --- ranks ---------------------------------------------------------------------------------------


@within(60)
async def test_a_moment_with_holes_is_told_to_all_ranks_and_is_never_whole_to_the_master() -> None:
    async with nodes(2) as (a, b):
        other = b.opens(2, world=3)
        ranks = [a.opens(local, world=3, local=local, of=2) for local in range(2)]
        for rank in ranks:
            await rank.slots()
        for rank in ranks:
            rank.save(0, 5, beliefs=(slot.Belief(7, 2),))
        await a.says(a.holds(FIVE, 0, 1))
        ranks[0].save(1, 6, beliefs=(slot.Belief(7, 2),))
        ranks[1].save(1, 6, beliefs=(slot.Belief(8, 2),))
        for rank in ranks:
            said = await rank.told(keeper.Lost)
            assert isinstance(said, keeper.Lost)
            assert (said.round, said.step, said.apart) == (*SIX, True)
            assert said.reason.startswith("ranks 0, 1 do not hold the same of ")
        (found,) = (await a.says(lambda told: told.lost)).lost
        b.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, lost=[found]))
        assert await other.told(keeper.Lost) == keeper.Lost(round=1, step=6, reason=found.reason)
        ranks[0].save(2, 7)
        ranks[1].save(2, 7)
        await a.says(a.holds(SEVEN, 0, 1))
        assert not any(a.holds(SIX, 0, 1)(told) for told in a.said), a.said
        a.end()
        a.__init__(a.vault)  # type: ignore[misc]
        (again,) = a.snapshots.statements()
        assert sorted(h.moment.step for h in again.holdings) == [5, 7]


@within(60)
async def test_what_a_rank_has_failed_to_keep_is_told_to_all_ranks_until_it_has_it() -> None:
    """Else theirs is never whole, and they wait for it for good."""
    async with nodes(2) as (a, b):
        other = b.opens(2, world=3)
        failed, beside = (a.opens(local, world=3, local=local, of=2) for local in range(2))
        await failed.slots()
        failed.tell(keeper.Failed(step=6, reason="no memory"))
        lost = keeper.Lost(round=1, step=6, reason="rank 0: no memory")
        assert await beside.told(keeper.Lost) == lost
        (found,) = (await a.says(lambda told: told.lost)).lost
        b.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, lost=[found]))
        assert await other.told(keeper.Lost) == lost
        failed.tell(keeper.Failed(step=7, reason="no space"))
        failed.tell(keeper.Written(step=7, bytes=9, digest=5))
        failed.save(0, 6)
        beside.tell(keeper.Written(step=6, bytes=9, digest=5))
        await a.says(
            lambda told: {h.moment.step: len(h.durable) for h in told.holdings} == {6: 1, 7: 1}
        )
        assert not a.said[-1].lost


@within(60)
async def test_what_is_to_go_to_storage_is_so_on_every_rank_before_it_hears_of_anything_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one of them it took the place of a step that was due."""
    monkeypatch.setattr(sys.modules[__name__], "NAME", str(tmp_path))
    async with nodes(1) as (a,):
        ranks = [a.opens(local, world=2, local=local, of=2) for local in range(2)]
        for rank in ranks:
            await rank.slots()
        ranks[0].save(0, 6, persist=True)
        ranks[1].save(0, 6)
        ranks[1].save(1, 7)
        await a.says(a.holds(SIX, 0, 1))
        flush = [pb.Flush(moment=pb.Moment(round=1, step=6), ranks=[0, 1])]
        whole = pb.Moment(round=1, step=7)
        a.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, flush=flush, whole=whole))
        for rank, due in zip(ranks, ([True], [True, False]), strict=True):
            await rank.told(keeper.Whole)
            views = [memoryview(mmap.mmap(fd, 0)) for fd in rank.fds[: len(due)]]
            held = [slot.look(view) for view in views]
            assert [one.stamp.persist for one in held if one is not None] == due


@within(60)
async def test_what_was_written_is_told_of_until_something_later_is_committed() -> None:
    """Also by a node that commits nothing itself, but for the last few."""
    async with nodes(1) as (a,):
        rank = a.opens(0)
        for step in range(1, 31):
            rank.tell(keeper.Written(step=step, bytes=9, digest=5))
        await a.says(lambda told: len(told.holdings) == 30)
        for committed, left in ((20, range(20, 31)), (30, range(23, 31))):
            at = pb.Moment(round=1, step=committed)
            a.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, committed=at))
            (told,) = a.snapshots.statements()
            assert sorted(one.moment.step for one in told.holdings) == list(left)


@within(60)
async def test_what_a_rank_leaves_out_is_told_to_all_once() -> None:
    """However much there is of it, in as few words."""
    async with nodes(2) as (a, b):
        other = b.opens(2, world=3)
        ranks = [a.opens(local, world=3, local=local, of=2) for local in range(2)]
        await ranks[0].slots()
        for step in (6, 8, 40):
            for rank in ranks:
                rank.tell(keeper.Skipped(step=step))
        told = await a.says(lambda told: [one.last for one in told.left_out] == [40])
        assert [(one.round, one.first) for one in told.left_out] == [(1, 6)]
        assert sum(bool(said.left_out) for said in a.said) == 3, "what is no news is not said"
        heard = [await ranks[0].told(keeper.LeftOut) for _ in range(3)]
        assert heard[-1] == keeper.LeftOut(spans=((1, 6, 40),))
        b.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, left_out=told.left_out))
        assert await other.told(keeper.LeftOut) == heard[-1]
        ranks[0].save(0, 41)
        ranks[0].tell(keeper.Skipped(step=42))
        told = await a.says(lambda told: len(told.left_out) == 2)
        assert [(one.first, one.last) for one in told.left_out] == [(6, 40), (42, 42)]
        ranks[1].tell(keeper.Skipped(step=41))
        told = await a.says(lambda told: [(s.first, s.last) for s in told.left_out] == [(6, 42)])
        whole = pb.Moment(round=1, step=42)
        a.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, whole=whole))
        (after,) = a.snapshots.statements()
        assert after.left_out == told.left_out, "who waits for one of those is to hear of it"


@within(60)
async def test_what_is_damaged_in_memory_is_told_to_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of other nodes wait for it, too."""
    monkeypatch.setattr(sys.modules[__name__], "NAME", str(tmp_path))
    async with nodes(1) as (a,):
        rank = a.opens(1)
        await rank.slots()
        rank.save(0, 5, persist=True)
        await a.says(a.holds(FIVE, 1))
        view = memoryview(mmap.mmap(rank.fds[0], 0))
        view[slot.PAGE + 10] ^= 1
        flush = pb.Flush(moment=pb.Moment(round=1, step=5), ranks=[1])
        a.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, flush=[flush]))
        (lost,) = (await a.says(lambda told: told.lost)).lost
        assert (lost.moment.round, lost.moment.step) == FIVE
        assert lost.reason == "rank 1: bytes 0 to 2000 in the slot of rank 1 are damaged"


@within(60)
async def test_what_a_rank_writes_meanwhile_is_told_of_as_it_was_at_one_time() -> None:
    async with nodes(1) as (a,):
        rank = a.opens(0, world=1)
        await rank.slots()
        over = threading.Event()

        def write() -> None:
            for step in count(1):
                if over.is_set():
                    return
                with contextlib.suppress(BlockingIOError):  # nobody listens now
                    rank.save(0, step, persist=bool(step % 2))

        writer, before = threading.Thread(target=write), sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        writer.start()
        try:
            seen: set[int] = set()
            while len(seen) < 60:
                a.snapshots.obey(order())
                for told in a.snapshots.statements():
                    for holding in told.holdings:
                        seen.add(holding.moment.step)
                        assert holding.persist == bool(holding.moment.step % 2), holding
        finally:
            over.set()
            writer.join()
            sys.setswitchinterval(before)


@within(60)
async def test_a_rank_that_opens_is_told_what_is_kept() -> None:
    """Else the first saves of a round write over the only moment that no node takes with it."""
    async with nodes(1) as (a,):
        a.snapshots.obey(order(whole=SIX, keep=(FIVE,)))
        rank = a.opens(0, round_=2)
        assert await rank.told(keeper.Whole) == keeper.Whole(round=1, step=6, keep=(FIVE,))


@within(60)
async def test_a_rank_that_does_not_read_hears_the_newest_and_sees_nothing_newer_before() -> None:
    async with nodes(1) as (a,):
        rank = await saved(a, 0, 1)
        rank.tell(keeper.Load(question=1))  # its answer is to come through as well
        await a.says(lambda told: told.asks)
        last = 3000
        for step in range(1, last + 1):
            a.snapshots.obey(order(whole=Moment(1, step), keep=(Moment(1, step),)))
        answer = order(whole=Moment(1, last), keep=(Moment(1, last),))
        answer.restore.round = answer.restore.load = 1
        a.snapshots.obey(answer)
        assert a.snapshots._of(NAME).clients, "it is not cut off"
        rank.save(1, last)
        view = memoryview(mmap.mmap(rank.fds[1], 0))
        assert not slot.read(view).all_units, "it is not marked before it is told"
        heard: list[keeper.ToRank] = []
        while not slot.read(view).all_units:
            assert keeper.Whole(round=1, step=last, keep=((1, last),)) not in heard[:-1]
            heard.append(await rank.told(object))
        steps = [message.step for message in heard if isinstance(message, keeper.Whole)]
        while steps[-1] < last:
            message = await rank.told(keeper.Whole)
            assert isinstance(message, keeper.Whole)
            steps.append(message.step)
        assert steps == sorted(steps)
        assert len(steps) < last
        assert any(isinstance(message, keeper.Restore) for message in heard)


@within(60)
async def test_who_says_twice_what_it_is_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes(1) as (a,):
        rank = a.opens(0)
        rank.tell(
            keeper.opening(
                terms=Terms(),
                checkpoint=NAME,
                rank=0,
                world_size=2,
                local_rank=0,
                local_world_size=1,
            )
        )
        assert await rank.hear() is None
        assert not a.snapshots._of(NAME).clients
    assert "says twice what it is" in caplog.text


@within(60)
async def test_a_node_alone_has_room_for_replicas_once_there_is_another() -> None:
    async with nodes(1) as (a,):
        alone = a.opens(0, world=1)
        await alone.slots()
        alone.save(0, 5)
        assert not (await a.says(a.holds(FIVE, 0))).replicas
        both = a.opens(0, round_=2)
        await both.slots()
        both.save(0, 6)
        assert (await a.says(a.holds(Moment(2, 6), 0))).replicas


@within(60)
async def test_a_flush_that_comes_before_the_rank_has_let_go_is_done_once_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot can be seen, told of and ordered between its last byte and the end of the claim."""
    monkeypatch.setattr(sys.modules[__name__], "NAME", str(tmp_path))
    async with nodes(1) as (node,):
        rank = node.opens(0, world=1)
        await rank.slots()
        claim = slot.claim(rank.fds[0], exclusive=True)
        assert claim is not None
        rank.save(0, 5, persist=True)
        await node.says(node.holds(FIVE, 0))
        flush = pb.Flush(moment=pb.Moment(round=1, step=5), ranks=[0])
        node.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, flush=[flush]))
        os.close(claim)
        rank.tell(keeper.Held())
        await node.says(lambda told: any(h.durable for h in told.holdings))
    assert list(tmp_path.glob("step-00000005/shard-*"))


# --- a state that grows, memory that is short, the end -------------------------------------------


@within(60)
async def test_slots_that_have_become_too_small_go_once_something_newer_is_whole() -> None:
    async with nodes(1, several_nodes=False) as (a,):
        rank = await saved(a, 0, 5)
        a.snapshots.obey(order(whole=FIVE))
        small = len(rank.fds)
        rank.tell(keeper.Need(bytes=2 * SIZE))
        await rank.told(keeper.Slots)
        rank.save(small, 6)
        await a.says(a.holds(SIX, 0))
        assert sorted(len(one.view) for one in a.slots("own").values())[:2] == [SIZE, 2 * SIZE]
        a.snapshots.obey(order(whole=SIX))
        assert {len(one.view) for one in a.slots("own").values()} == {2 * SIZE}


@within(60)
async def test_memory_that_is_short_is_reckoned_once_for_all_ranks_of_a_node(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def asks(rank: Rank) -> type:
        rank.tell(keeper.Need(bytes=SIZE))
        while (found := await rank.hear()) is not None:
            rank.fds += found[1]
            if isinstance(found[0], keeper.Slots | keeper.Refused):
                return type(found[0])
        raise AssertionError("cut off")

    room = 0
    monkeypatch.setattr(memory, "available", lambda: room)
    async with nodes(1, several_nodes=False) as (a,):
        first, second = (a.opens(local, local=local, of=2) for local in (0, 1))
        assert await asks(first) is keeper.Refused
        room = 100 * SIZE
        assert await asks(second) is keeper.Refused, "as the other was"
        assert await asks(first) is keeper.Slots
        assert await asks(second) is keeper.Slots
        first.tell(keeper.Shed())
        await a.says(lambda told: len(a.slots("own")) == memory.SLOTS)
    assert caplog.text.count("none are taken") == 1
    assert "there is memory for snapshots again" in caplog.text


@within(60)
async def test_slots_of_what_nobody_has_open_or_saved_to_are_anothers_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = memory.SLOTS * SIZE
    monkeypatch.setattr(memory, "available", lambda: room)
    async with nodes(1, several_nodes=False) as (a,):
        both = [a.opens(local, local=local, of=2, name="/other") for local in (0, 1)]
        for one in both:
            await one.slots()
        both[0].end.close()
        await both[0].closed
        assert len(a.snapshots._shelf.of("/other").own[0]) == 2
        both[1].end.close()
        await both[1].closed
        assert len(a.snapshots._shelf.of("/other").own[0]) == 2, "who opens it again has them"
        rank = await saved(a, 0, 5)
        assert len(rank.fds) == memory.SLOTS
        rank.end.close()
        await rank.closed
        assert len(a.slots("own")) == memory.SLOTS, "who goes on with it has them"


@within(60)
async def test_what_all_ranks_of_a_round_open_to_load_alone_is_said_to_be_that() -> None:
    kept = Terms(retention=Retention(last=3))
    async with nodes(1, several_nodes=False) as (a,):
        assert not a.snapshots._of(NAME).loads.read_only

        async def says(round_: int, local: int, **more: Any) -> bool:
            rank = a.opens(local, round_=round_, local=local, **more)
            a.said.clear()
            rank.tell(keeper.Load(question=1))
            return (await a.says(lambda _: True)).read_only

        assert not await says(1, 0, terms=kept)
        assert await says(2, 0, read_only=True)
        assert await says(2, 1, read_only=True)
        assert a.snapshots._of(NAME).flushes.terms == kept, "as who saves to it wants it"
        assert not await says(2, 0)
        assert not await says(2, 1, read_only=True)


@within(60)
async def test_the_end_says_what_was_in_memory_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes(1, several_nodes=False) as (a,):
        await saved(a, 0, 5)
        a.snapshots.obey(order(whole=FIVE))
        a.snapshots.say_lost()
        lost = f"checkpoint {NAME}: step 5 was in memory alone and is lost"
        assert caplog.messages[-1] == f"{lost}; no step is on storage"
        a.snapshots._of(NAME).committed = pb.Moment(round=1, step=4)
        a.snapshots.say_lost()
        assert caplog.messages[-1] == f"{lost}; step 4 is on storage"
        caplog.clear()
        a.snapshots._of(NAME).committed = pb.Moment(round=1, step=5)
        a.snapshots.say_lost()
        a.snapshots._of(NAME).committed = None
        loaded = pb.Restore(round=2, moment=pb.Moment(round=1, step=4))
        a.snapshots.obey(pb.SnapshotOrders(checkpoint=NAME, restore=loaded))
        a.snapshots.say_lost()
        assert not caplog.messages, "what was loaded from storage is there"


@within(60)
async def test_an_end_that_waits_for_storage_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """And how it is ended: what was said of that storage before was said of a job that trains."""
    async with nodes(1, several_nodes=False) as (a,):
        await saved(a, 0, 5)
        a.snapshots.obey(order(whole=FIVE))
        message = flusher.Delete(
            id=1, checkpoint=NAME, storage_options="{}", retention=Retention(last=1)
        )
        flushes = a.snapshots._of(NAME).flushes
        flushes._tasks[1] = flushing._Task(moment=FIVE, message=message, complaint="it is full")
        persisted = asyncio.create_task(a.snapshots.persisted(600, "; ^C gives it up"))
        await asyncio.sleep(0)
        said = f"training is over; checkpoint {NAME}: step 5 waits for its storage, 600 s at most: it is full"
        assert caplog.messages[-1] == f"{said}; ^C gives it up"
        a.snapshots._news.set()
        await asyncio.sleep(0)
        assert caplog.text.count("training is over") == 1
        del flushes._tasks[1]
        a.snapshots._news.set()
        await persisted


@within(60)
async def test_what_a_rank_has_written_itself_is_told() -> None:
    async with nodes(1, several_nodes=False) as (a,):
        rank = a.opens(0)
        rank.tell(keeper.Written(step=7, bytes=9000, digest=5, value=0.5))
        told = await a.says(lambda told: told.holdings)
        (holding,) = told.holdings
        assert (holding.moment.round, holding.moment.step, holding.persist) == (1, 7, True)
        assert [(x.rank, x.bytes, x.digest) for x in holding.durable] == [(0, 9000, 5)]


@within(60)
async def test_what_ranks_have_written_themselves_may_have_holes_too() -> None:
    """Committed, it would lack what each took the other to write."""
    async with nodes(1, several_nodes=False) as (a,):
        ranks = [a.opens(local, local=local, of=2) for local in range(2)]
        for step, beliefs in ((6, (7, 8)), (7, (7, 7))):
            for rank, belief in zip(ranks, beliefs, strict=True):
                rank.tell(keeper.Written(step=step, bytes=9, digest=5, beliefs=((belief, 2),)))
        for rank in ranks:
            said = await rank.told(keeper.Lost)
            assert isinstance(said, keeper.Lost)
            assert (said.round, said.step) == SIX
        await a.says(
            lambda told: (7, 2) in [(h.moment.step, len(h.durable)) for h in told.holdings]
        )
        seen = [(h.moment.step, len(h.durable)) for told in a.said for h in told.holdings]
        assert (6, 2) not in seen, a.said


@within(60)
async def test_a_rank_may_save_before_others_have_slots(caplog: pytest.LogCaptureFixture) -> None:
    async with nodes(1, several_nodes=False) as (a,):
        first, second = (a.opens(local, local=local, of=2) for local in (0, 1))
        await first.slots()
        first.save(0, 5)
        await second.slots()
        second.save(0, 5)
        await a.says(a.holds(FIVE, 0, 1))
    assert "Exception in callback" not in caplog.text


@within(60)
async def test_images_beside_one_that_a_rank_has_written_itself_are_told_of() -> None:
    """Else nobody has them written, and all who wait for that step wait for good."""
    async with nodes(1, several_nodes=False) as (a,):
        first, second = (a.opens(local, local=local, of=2) for local in (0, 1))
        await first.slots()
        second.tell(keeper.Written(step=5, bytes=9000, digest=5))
        await a.says(lambda told: told.holdings)
        first.save(0, 5, persist=True)
        told = await a.says(a.holds(FIVE, 0))
        assert [shard.rank for shard in told.holdings[0].durable] == [1]
        first.save(1, 6)
        first.save(2, 7)
        second.tell(keeper.Written(step=7, bytes=9000, digest=5))
        told = await a.says(a.holds(SEVEN, 0))

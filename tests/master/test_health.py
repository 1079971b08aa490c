"""What a hang is known by, through the streams of a master: quiet told, looks ordered, a verdict folded."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic.master import events as ev
from elastic.master import hangs
from elastic.master.journal import Journal
from elastic.master.policy import HANG_ACTIONS, Policy
from elastic.master.shell import Shell
from elastic.master.streams import Streams
from elastic.proto import codec, job_folder
from elastic.proto import master_pb2 as pb
from elastic.proto.looks import Frame, Look, Thread
from tests.master.serving import within
from tests.master.streaming import EXIT, RUN, Stream, serving

WAIT = pb.Directive.WAIT
FLOOR = 0.4
STEP = 0.01
QUIET = 0.75 * FLOOR
"""Seconds of a rank without a step: enough to look."""


def policy(action: str = "recover") -> Policy:
    return Policy(min_nodes=2, max_nodes=2, hang_action=action, hang_floor=FLOOR)


def beat(
    agent: Stream,
    rank: int,
    quiet: float = 0.0,
    *,
    number: int = 1,
    ticks: int = 40,
    phase: str = "",
) -> None:
    progress = pb.RankProgress(rank=rank, ticks=ticks, quiet=quiet, interval=STEP, phase=phase)
    agent.say(heartbeat=pb.Heartbeat(round=number, ranks=[progress]))


def look(rank: int, state: str = "T") -> str:
    """Who is not rank 0 is in this state."""
    waits = Frame(function="all_reduce", file="/torch/distributed/distributed_c10d.py", line=5)
    main = Frame(function="main", file="train.py", line=9)
    frames = (main,) if rank else (waits, main)
    thread = Thread(tid=7 + rank, name="MainThread", frames=frames, gil=state == "R")
    state = state if rank else "S"
    return codec.dumps(
        Look(
            rank=rank, pid=7 + rank, at=1.0, state=state, threads=(thread,), how="py-spy", ticks=40
        )
    )


async def begun(streams: Streams) -> tuple[Stream, Stream]:
    """Two nodes of a rank each train in round 1, and the master knows that their steps are short: it asks them
    to tell of a quiet of half the floor."""
    agents = Stream(streams, "a"), Stream(streams, "b")
    for rank, agent in enumerate(agents):
        await agent.ordered(RUN)
        beat(agent, rank)
    for rank, agent in enumerate(agents):
        while (await told(agent, "watch", rank)).watch.quiet > FLOOR / 2:
            pass
    return agents


async def told(agent: Stream, kind: str, rank: int | None = None) -> pb.ToAgent:
    """The next of its kind; rank: that goes on with its steps meanwhile."""
    while True:
        try:
            message = await asyncio.wait_for(agent.heard.get(), 0.1 if rank is not None else None)
        except TimeoutError:
            assert rank is not None
            beat(agent, rank)
            continue
        if message.HasField(kind):
            return message


def answer(
    agent: Stream,
    rank: int,
    order: pb.Examine,
    look: Callable[[int], str] = look,
    **wrong: Any,
) -> None:
    """Its rank was looked at, and rank 1 is stopped, or as `look` says. wrong: what is said otherwise."""
    right: dict[str, Any] = {"round": 1, "number": order.number, "looks": [look(rank)]}
    agent.say(examined=pb.Examined(**right | wrong))


async def answered(*agents: Stream, **wrong: Any) -> None:
    """All look once, as they are told to."""
    for rank, agent in enumerate(agents):
        order = (await told(agent, "examine")).examine
        assert order.round == 1
        answer(agent, rank, order, **wrong)


@within(120)
async def test_a_rank_that_is_stopped_is_named_by_two_looks(tmp_path: Path) -> None:
    async with serving(tmp_path, policy()) as (shell, streams):
        a, b = await begun(streams)
        beat(b, 1, QUIET)
        for _ in range(2):
            await answered(a, b)
        await a.ordered(WAIT)
        assert shell.reason.startswith("rank 1 on b is stopped")
        assert dict(shell.job.ledger.restarts) == {"hang": 1}
        account = (tmp_path / job_folder.hang(1)).read_text()
        assert "rank 1 on b is stopped" in account
        assert account.count("\nrank ") == 2, account


@pytest.mark.parametrize(("phase", "named"), [("", True), ("evaluate", False)])
@within(120)
async def test_a_rank_whose_script_names_a_phase_gets_its_time(
    phase: str, named: bool, tmp_path: Path
) -> None:
    """Which its heartbeat tells."""
    async with serving(tmp_path, policy()) as (shell, streams):
        a, b = await begun(streams)
        beat(b, 1, QUIET, phase=phase)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5 * FLOOR):
                while True:
                    await answered(a, b, look=partial(look, state="R"))
        assert bool(shell.job.ledger.restarts) == named, shell.reason


XID = "NVRM: Xid (PCI:0000:03:00): 119, pid=7, Timeout waiting for RPC from GSP1!"


@pytest.mark.parametrize(
    ("lines", "machine"), [([XID], True), ([XID.replace("119", "31")], False), ([], False)]
)
@within(120)
async def test_what_a_kernel_records_of_a_device_goes_with_the_hang(
    lines: list[str], machine: bool, tmp_path: Path
) -> None:
    """Only of the node whose rank is named. 31 is a program's."""
    async with serving(tmp_path, policy()) as (_, streams):
        a, b = await begun(streams)
        beat(b, 1, QUIET)
        await answered(a, b, kernel_log=lines)
        await answered(a, b)
        await a.ordered(WAIT)
    with contextlib.closing(Journal(tmp_path / "journal.db", read_only=True)) as journal:
        *_, entries = journal.load()
    (hung,) = [entry.event for entry in entries if isinstance(entry.event, ev.Hung)]
    assert (hung.nodes, hung.machine) == (("b",), machine)
    assert hung.kernel_log == ((XID,) if machine else ())


async def looking(a: Stream, b: Stream) -> list[pb.Examine]:
    """Rank 1 is quiet, and was seen to be stopped once; the orders to look again."""
    beat(b, 1, QUIET)
    await answered(a, b)
    return [(await told(agent, "examine")).examine for agent in (a, b)]


@within(120)
async def test_ranks_that_go_on_again_end_the_suspicion(tmp_path: Path) -> None:
    """Whatever late answers say then."""
    async with serving(tmp_path, policy()) as (shell, streams):
        a, b = await begun(streams)
        orders = await looking(a, b)
        beat(b, 1)
        for rank, (agent, order) in enumerate(zip((a, b), orders, strict=True)):
            answer(agent, rank, order)
        await over(shell, a, b)
        assert not shell.job.ledger.restarts


@within(120)
async def test_nothing_is_judged_while_no_heartbeat_is_taken_in(small_disk: Path) -> None:
    """The journal's disk is full: nobody knows how long ranks have been quiet."""
    async with serving(small_disk, policy()) as (shell, streams):
        a, b = await begun(streams)
        orders = await looking(a, b)
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        while not shell.stuck:
            shell.fold(ev.Saving(1))
        for rank, (agent, order) in enumerate(zip((a, b), orders, strict=True)):
            answer(agent, rank, order)
            while not agent.said.empty():
                await asyncio.sleep(0.01)
        ballast.unlink()
        while shell.stuck:
            await asyncio.sleep(0.01)
        beat(b, 1)
        await heard(a, b)
        assert not shell.job.ledger.restarts
        await a.end()
        await b.end()


async def heard(*agents: Stream) -> None:
    """All that they have said so far."""
    for agent in agents:
        agent.say(heartbeat=pb.Heartbeat(round=1, metrics='{"heard": 1}'))
    while not all(session.metrics for session in agents[0].streams.sessions.values()):
        await asyncio.sleep(0)


async def over(shell: Shell, *agents: Stream) -> None:
    """All that they have said so far has been heard, and what came of it was done."""
    await heard(*agents)
    shell.fold(ev.DrainAsked(None, "enough"))
    await agents[0].ordered(EXIT)


@pytest.mark.parametrize("wrong", [{"number": 7}, {"round": 2}, {"looks": ["{", look(9)]}])
@within(120)
async def test_an_answer_to_nothing_counts_for_nothing(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To another look, of another round, of no rank of this one."""
    monkeypatch.setattr(hangs, "ANSWER", 0.2)
    async with serving(tmp_path, policy()) as (shell, streams):
        a, b = await begun(streams)
        beat(b, 1, QUIET)
        for _ in range(2):
            await answered(a, b, **wrong)
        await over(shell, a, b)
        assert not shell.job.ledger.restarts


@within(120)
async def test_who_does_not_answer_is_waited_for_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "ANSWER", 0.2)
    async with serving(tmp_path, policy()) as (shell, streams):
        a, b = await begun(streams)
        beat(b, 1, QUIET)
        for _ in range(2):
            answer(b, 1, (await told(b, "examine")).examine)
        await a.ordered(WAIT)
        assert dict(shell.job.ledger.restarts) == {"hang": 1}


@pytest.mark.parametrize("action", HANG_ACTIONS)
@within(120)
async def test_what_becomes_of_a_hang(action: str, tmp_path: Path) -> None:
    """recover: another round; fail: the job has failed; dump: it is told of, once, and the round stands; ignore:
    nobody is asked for anything."""
    async with serving(tmp_path, policy(action)) as (shell, streams):
        if action == "ignore":
            a, b = Stream(streams, "a"), Stream(streams, "b")
            for rank, agent in enumerate((a, b)):
                await agent.ordered(RUN)
                beat(agent, rank)
                beat(agent, rank, QUIET)
            await over(shell, a, b)
            left = [b.heard.get_nowait() for _ in range(b.heard.qsize())]
            assert not any(m.HasField("watch") or m.HasField("examine") for m in left)
            assert not (tmp_path / job_folder.hang(1)).exists()
            return
        a, b = await begun(streams)
        beat(b, 1, QUIET)
        for _ in range(2):
            await answered(a, b)
        if action == "fail":
            assert (await a.ordered(EXIT)).reason.startswith("rank 1 on b is stopped")
        elif action == "recover":
            await a.ordered(WAIT)
            a.say(spare_store=pb.SpareStore(address="a:2"))
            assert (await a.ordered(RUN)).round == 2
        else:
            while not (tmp_path / job_folder.hang(1)).exists():
                await asyncio.sleep(0.01)
            assert shell.job.round is not None
            assert (shell.job.round.number, shell.job.round.standing) == (1, True)
            assert not shell.job.ledger.restarts
            (tmp_path / job_folder.hang(1)).unlink()
            beat(a, 0)
            beat(b, 1)  # it goes on, and hangs again
            beat(b, 1, QUIET)
            for _ in range(2):
                await answered(a, b)
            while not (tmp_path / job_folder.hang(1)).exists():
                await asyncio.sleep(0.01)

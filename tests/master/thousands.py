"""Thousands of nodes whose ranks hang: what decides about them alone, with a number for a clock."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from elastic.master import events as ev
from elastic.master.events import NodeId
from elastic.master.health import Health
from elastic.master.policy import Policy
from elastic.master.rendezvous import Seat
from elastic.master.session import Session
from elastic.master.shell import Shell
from elastic.master.state import Job, Round
from elastic.proto import codec
from elastic.proto import master_pb2 as pb
from elastic.proto.looks import Collective, Frame, Look, Thread

STEP = 0.02
CALLED = tuple(
    Frame(function=f"Module{n % 7}.forward", file=f"/opt/venv/torch/nn/modules/m{n % 9}.py", line=n)
    for n in range(28)
)
WAIT = Frame(
    function="all_reduce", file="/opt/venv/torch/distributed/distributed_c10d.py", line=2806
)
LOOP = Frame(function="endless", file="/home/me/train.py", line=9)


@dataclass
class Clocked:
    """A shell's part that is asked here."""

    job: Job
    policy: Policy
    time: float = 100.0
    stuck: bool = False
    hung: asyncio.Queue[ev.Hung] = field(default_factory=asyncio.Queue[ev.Hung])

    def now(self) -> float:
        return self.time

    def fold(self, event: ev.Hung) -> None:
        self.hung.put_nowait(event)


@dataclass
class Node:
    """A session's part that is asked here."""

    node_id: NodeId
    orders: asyncio.Queue[pb.Examine]
    watches: int = 0

    def push(self, message: pb.ToAgent) -> None:
        if message.HasField("examine"):
            self.orders.put_nowait(message.examine)


class Thousands:
    """Nodes that train in a round, with so many ranks each; all know their rhythm."""

    def __init__(self, nodes: int, ranks: int, folder: Path | None = None) -> None:
        self.ranks = ranks
        seats = tuple(Seat(node_id=NodeId(f"n{n}"), ranks=ranks) for n in range(nodes))
        incarnations = {seat.node_id: ev.Incarnation(1) for seat in seats}
        round_ = Round(
            number=1, seats=seats, incarnations=incarnations, roles={}, store="s:1", started=0.0
        )
        job = Job(round=round_, last_round=1)
        self.shell = Clocked(job, Policy(min_nodes=1, max_nodes=nodes))
        self.nodes = [Node(seat.node_id, asyncio.Queue()) for seat in seats]
        sessions = {node.node_id: cast("Session", node) for node in self.nodes}
        self.health = Health(cast("Shell", self.shell), sessions, folder)
        self.health.review()
        for _ in range(30):
            self.beat(0)
            self.shell.time += 1.0
        for number in range(nodes):
            self.beat(number)

    def beat(self, number: int, quiet: float = 0.0) -> None:
        """A node tells how long its ranks have been quiet."""
        first = number * self.ranks
        ranks = [
            pb.RankProgress(rank=rank, ticks=40, quiet=quiet, interval=STEP)
            for rank in range(first, first + self.ranks)
        ]
        self.health.heard(self._session(number), pb.Heartbeat(round=1, ranks=ranks))

    def answer(self, number: int, looks: list[str], order: int) -> None:
        """A node has looked at its ranks, as it was told by this order."""
        seen = pb.Examined(round=1, number=order, looks=looks)
        self.health.examined(self._session(number), seen)

    def looks(self, number: int, loops: int) -> list[str]:
        """All wait in an all-reduce, but for the rank that loops."""
        first = number * self.ranks
        return [look(rank, loops=rank == loops) for rank in range(first, first + self.ranks)]

    async def orders(self) -> Iterator[int]:
        """The next to look, once all nodes have it; by node."""
        return iter([(await node.orders.get()).number for node in self.nodes])

    def _session(self, number: int) -> Session:
        return cast("Session", self.nodes[number])


def look(rank: int, *, loops: bool) -> str:
    """At a rank that loops, or waits in an all-reduce for one that does."""
    frames = (LOOP if loops else WAIT, *CALLED)
    state = "R" if loops else "S"
    collectives = tuple(
        Collective(
            group=group, seq=5, op="gloo:all_reduce", sizes="[[1000]]", p2p=False, device=False,
            started=True, done=loops,
        )
        for group in ("0", "1")
    )  # fmt: skip
    thread = Thread(tid=7 + rank, name="MainThread", frames=frames, gil=loops, state=state)
    return codec.dumps(
        Look(
            rank=rank, pid=7 + rank, at=1.0, state=state, wchan="" if loops else "ep_poll",
            threads=(thread,), how="py-spy", ticks=40, collectives=collectives, transfers=(),
        )
    )  # fmt: skip

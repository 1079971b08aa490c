"""What the ranks of this node ask to load in a round, and what is answered."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.agent.snapshots.clients import Client
from elastic.agent.snapshots.shelf import Slot
from elastic.proto import codec, descriptors, keeper
from elastic.proto import master_pb2 as pb
from elastic.proto.courier import Tls


@dataclass(slots=True)
class Loads:
    """Of one checkpoint in one round. Each rank's first load is number 1, whichever checkpointer it asks
    by; a load is the node's once all of its ranks have come to it."""

    round: int = 0
    read_only: bool = False
    """Who has opened it in this round only loads."""
    counts: dict[int, int] = field(default_factory=dict[int, int])
    """How many each local rank has asked for."""
    looked: pb.Looked | None = None
    """The last that rank 0 has found on storage, if it is here."""
    damaged: list[pb.Damage] = field(default_factory=list[pb.Damage])
    """What these ranks have found to be."""
    doubts: list[pb.Doubt] = field(default_factory=list[pb.Doubt])
    """Of what they have saved."""

    def ask(self, client: Client, said: keeper.Open, message: keeper.Load) -> None:
        count = self.counts.get(said.local_rank, 0) + 1
        self.counts[said.local_rank] = client.load = count
        client.asks, client.question = message, message.question

    def hear(self, client: Client, found: keeper.Looked, job: str) -> None:
        """What rank 0 has found; job: the job's own id."""
        client.question = found.question
        self.looked = pb.Looked(look=client.look, error=found.error)
        del self.looked.look.damaged[:]
        if found.step:
            self.looked.stored.step = found.step
            self.looked.stored.round = found.round if found.job == job else 0  # older than memory

    def give_up(self, found: keeper.Damaged) -> None:
        """A rank cannot load what it was told to; it waits for its end."""
        moment = pb.Moment(round=found.round, step=found.step)
        self.damaged.append(
            pb.Damage(
                round=self.round, moment=moment, from_memory=found.from_memory, what=found.what
            )
        )

    def doubt(self, said: keeper.Doubted) -> None:
        """What all ranks here say is told once."""
        told = pb.Doubt(round=self.round, after=said.after, ranks=said.ranks, what=said.what)
        if told not in self.doubts:
            self.doubts.append(told)

    def state(self, clients: Sequence[Client], told: pb.Snapshots) -> None:
        """Add to what the master is told."""
        told.read_only = self.read_only
        told.damaged.extend(self.damaged)
        told.doubts.extend(self.doubts)
        if self.looked is not None:
            told.looked.CopyFrom(self.looked)
        ours = {c.said.local_rank: c for c in clients if c.said is not None and c.asks is not None}
        first = next(iter(ours.values()), None)
        if first is None or first.said is None or len(ours) < first.said.local_world_size:
            return
        last = min(ours.values(), key=lambda client: client.load)
        told.asks, told.load = self.round, last.load
        if last.asks is not None and last.asks.step is not None:
            told.wanted = last.asks.step

    def look(self, clients: Sequence[Client], order: pb.StorageLook) -> None:
        """Have rank 0 look on storage, once."""
        damaged = tuple(
            keeper.Bad(round=one.moment.round, step=one.moment.step, what=one.what, later=one.later)
            for one in order.damaged
        )
        for client in list(clients):  # an answer may end one
            if client.said is None or client.said.rank or client.look == order:
                continue
            asked = client.round, client.load
            if client.question and asked == (order.round, order.load):
                client.look = order
                client.answer(keeper.Look(damaged=damaged, question=client.question))

    def answer(
        self, clients: Sequence[Client], answer: pb.Restore, here: Sequence[Slot], tls: Tls | None
    ) -> None:
        """Show those who ask what they are to load: the images of it that are here, and where others
        are."""
        images = here[: keeper.MOST_FDS - 1] if answer.from_memory else []
        fds = [one.fd for one in images]
        sources = keeper.Sources(
            sources=tuple(
                keeper.Source(base=s.base, ranks=tuple(s.ranks), needed=s.needed)
                for s in answer.sources
            ),
            tls=tls,
        )
        with contextlib.ExitStack() as undo:
            if answer.sources:
                fds.append(descriptors.memory_file(codec.dumps(sources).encode()))
                undo.callback(os.close, fds[-1])
            for client in list(clients):
                asked = client.round, client.load
                if not client.question or asked != (answer.round, answer.load):
                    continue
                restore = keeper.Restore(
                    round=answer.moment.round,
                    step=answer.moment.step,
                    from_memory=answer.from_memory,
                    images=len(images),
                    elsewhere=bool(answer.sources),
                    error=answer.error,
                    question=client.question,
                )
                client.question = 0
                client.answer(restore, tuple(fds))

"""What this node knows of one checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from elastic.agent.snapshots import memory, uneven
from elastic.agent.snapshots.clients import Client
from elastic.agent.snapshots.flushes import Flushes
from elastic.agent.snapshots.leaving import Leaving
from elastic.agent.snapshots.loads import Loads
from elastic.agent.snapshots.shelf import Slots
from elastic.agent.snapshots.uneven import Share
from elastic.proto import keeper
from elastic.proto import master_pb2 as pb
from elastic.proto.moment import MOST_SPANS, Moment, Span, merged
from elastic.proto.slot import Snapshot

NEVER = Moment(-1, -1)
"""Older than all."""
MOST_LOST = 16
"""Moments that are never whole, the newest, that are told of."""


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    name: str
    slots: Slots
    flushes: Flushes
    clients: list[Client] = field(default_factory=list[Client])
    """The ranks of this round that have opened it."""
    whole: pb.Moment | None = None
    all_units: int = 0
    """Of it."""
    committed: pb.Moment | None = None
    pending: bool = False
    """Something of it is on its way to storage, here or on another node."""
    answer: pb.Restore | None = None
    flush: list[pb.Flush] = field(default_factory=list[pb.Flush])
    """What the master wants on storage, the oldest first."""
    keep: frozenset[Moment] = frozenset()
    """What no rank may write over, beside the newest that is whole."""
    fetch: dict[tuple[Moment, int], pb.Fetch] = field(
        default_factory=dict[tuple[Moment, int], pb.Fetch]
    )
    """The replicas that the master wants here, by moment and rank."""
    reckoned: tuple[int, memory.Reckoning] | None = None
    """How many slots of that many bytes each rank of this node has."""
    refused: set[int] = field(default_factory=set[int])
    """The local ranks that were told that this is none: who asks again has it reckoned again."""
    sizes: dict[int, int] = field(default_factory=dict[int, int])
    """By local rank, how many bytes a slot must have that it uses."""
    leaving: Leaving = field(default_factory=Leaving)
    loads: Loads = field(default_factory=Loads)
    uneven: dict[Moment, str] = field(default_factory=dict[Moment, str])
    """The moments of its ranks' round that have holes, and what differs between which ranks."""
    straight: list[Share] = field(default_factory=list[Share])
    """What ranks have written themselves, of `flushes.written`."""
    failed: dict[tuple[Moment, int], str] = field(default_factory=dict[tuple[Moment, int], str])
    """By moment and rank, why a rank of this node has nothing of one that was to be persisted."""
    skipped: dict[int, list[Span]] = field(default_factory=dict[int, list[Span]])
    """By rank of this node, what it has left out."""
    skipping: set[int] = field(default_factory=set[int])
    """The ranks that have held or written nothing since what they have left out last."""
    skipped_elsewhere: tuple[Span, ...] = ()
    """By any rank of the job, as the master says."""
    elsewhere: dict[Moment, str] = field(default_factory=dict[Moment, str])
    """What is never whole for any node's ranks, and why, as the master says."""

    def find_holes(self, round_: int) -> bool:
        """Note the moments of that round that have any; whether that is news."""
        known = {at: why for at, why in self.uneven.items() if at.round == round_}
        torn = self.torn(found for _, found in self.slots.held())
        news = {at for at in torn if at.round == round_ and at not in known}
        for at in news:
            images = torn[at].items()
            known[at] = uneven.reason({rank: uneven.shared(one.image) for rank, one in images})
        self.uneven = known
        return bool(news)

    def torn(self, held: Iterable[Snapshot]) -> dict[Moment, dict[int, Share]]:
        """What has holes, of what is held and what ranks have written themselves; with the shares, by rank."""
        self.straight = [one for one in self.straight if one.moment in self.flushes.written]
        return uneven.torn([*map(uneven.share, held), *self.straight])

    def fail(self, at: Moment, rank: int, why: str) -> bool:
        """A rank of this node has nothing of a moment that was to be persisted; whether that is news."""
        before = self._reasons.get(at)
        self.failed[at, rank] = why
        newest = sorted({at for at, _ in self.failed})[-MOST_LOST:]
        self.failed = {key: why for key, why in self.failed.items() if key[0] >= newest[0]}
        return self._reasons.get(at) != before

    def skip(self, at: Moment, rank: int) -> bool:
        """A rank of this node leaves that moment out; whether that is news to the others."""
        before = self.left_out
        spans = [span for span in self.skipped.get(rank, ()) if span.round == at.round]
        if spans and rank in self.skipping:
            spans[-1] = spans[-1]._replace(last=at.step)
        else:
            spans = [*spans[1 - MOST_SPANS :], Span(at.round, at.step, at.step)]
        self.skipped[rank] = spans
        self.skipping.add(rank)
        return self.left_out != before

    def has(self, at: Moment, rank: int) -> None:
        """A rank of this node holds that moment, or has written it."""
        self.failed.pop((at, rank), None)
        self.skipping.discard(rank)

    @property
    def left_out(self) -> tuple[Span, ...]:
        """By ranks of this node; also before what is whole, for who waits for one of those."""
        return merged(span for spans in self.skipped.values() for span in spans)

    @property
    def lost(self) -> list[tuple[Moment, str]]:
        """What is never whole for want of this node's images, the oldest first. One that is damaged may have
        a replica: that the master knows."""
        damaged = {Moment(*at): why for (at, _), why in sorted(self.flushes.damaged.items())}
        return sorted((damaged | self._reasons).items())[-MOST_LOST:]

    @property
    def _reasons(self) -> dict[Moment, str]:
        failed = {at: f"rank {rank}: {why}" for (at, rank), why in sorted(self.failed.items())}
        return failed | self.uneven

    def lost_of(self, round_: int) -> tuple[keeper.Lost, ...]:
        """What ranks of that round are told of what is never whole, the oldest first."""
        reasons = self.elsewhere | self._reasons
        return tuple(
            keeper.Lost(round=at.round, step=at.step, reason=why, apart=at in self.uneven)
            for at, why in sorted(reasons.items())
            if at.round == round_
        )

    def learn(self, order: pb.SnapshotOrders) -> tuple[bool, bool]:
        """What the master says is so; whether something newer is whole, and whether other moments are to be
        kept."""
        whole = order.HasField("whole") and moment_of(order.whole) > moment_of(self.whole)
        if whole:
            self.whole, self.all_units = order.whole, order.all_units
        if order.HasField("committed") and moment_of(order.committed) > moment_of(self.committed):
            self.committed = order.committed
            self.flushes.forget(moment_of(order.committed))
        self.elsewhere = {moment_of(one.moment): one.reason for one in order.lost}
        self.skipped_elsewhere = tuple(Span(s.round, s.first, s.last) for s in order.left_out)
        keep = frozenset(map(moment_of, order.keep)) or self.keep  # a new master may not know yet
        kept, self.keep = keep != self.keep, keep
        return whole, kept

    @property
    def lasting(self) -> set[Moment]:
        """The moments whose replicas stay: also what was loaded, until its round has replicas."""
        if self.answer is None or max(self.keep, default=NEVER).round >= self.answer.round:
            return set(self.keep)
        return {*self.keep, moment_of(self.answer.moment)}

    @property
    def newest(self) -> Moment:
        """The newest in memory that counts, as far as this node has heard: what was whole in rounds
        before does no more once another round went on from something else."""
        whole = moment_of(self.whole)
        if self.answer is not None and whole.round < self.answer.round:
            return moment_of(self.answer.moment) if self.answer.from_memory else NEVER
        return whole

    @property
    def stored(self) -> Moment:
        """The newest that is on storage, as far as this node has heard or has written it."""
        ours = (Moment(*at) for at, written in self.flushes.written.items() if written.committed)
        return max(moment_of(self.committed), *ours, NEVER)

    @property
    def leaving_ranks(self) -> int:
        """How many ranks of this node are in the round that is to be left, as they say; 0: none said."""
        ours = (c.said for c in self.clients if c.round == self.leaving.round)
        return max((said.local_world_size for said in ours if said is not None), default=0)


def moment_of(message: pb.Moment | None) -> Moment:
    return NEVER if message is None else Moment(message.round, message.step)


def to_pb(at: Moment) -> pb.Moment:
    return pb.Moment(round=at.round, step=at.step)

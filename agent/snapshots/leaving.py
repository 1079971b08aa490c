"""Where this node's ranks are on their way out of a round (`master/leaving.py`), by what they say."""

from dataclasses import dataclass, field

from elastic.proto import keeper
from elastic.proto import master_pb2 as pb


@dataclass(slots=True)
class Leaving:
    """One checkpoint, in one round. Pure."""

    round: int = 0
    order: pb.Leave = field(default_factory=pb.Leave)
    """The last that the master gave."""
    next: int = 0
    """The step beyond each that a rank has saved without waiting."""
    waiting: dict[int, keeper.Saved] = field(default_factory=dict[int, keeper.Saved])
    """Who waits in a save, by local rank."""

    def hear(self, local_rank: int, saved: keeper.Saved) -> None:
        """A rank is at the end of a save."""
        if saved.waits:
            self.waiting[local_rank] = saved
        else:
            self.waiting.pop(local_rank, None)
            self.next = max(self.next, saved.step + 1)

    def stand(self, checkpoint: str, local_world_size: int) -> pb.Stand:
        """What the master is to hear."""
        told = pb.Stand(
            checkpoint=checkpoint, round=self.round, order=self.order.order, next=self.next
        )
        steps = {s.step for s in self.waiting.values() if s.waits == self.order.order}
        if len(self.waiting) == local_world_size and len(steps) == 1:
            heard = all(s.waits == self.order.order for s in self.waiting.values())
            told.waits = steps.pop() if heard else 0
            told.lost = next((s.lost for s in self.waiting.values() if heard and s.lost), "")
        return told

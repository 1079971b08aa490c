"""Which slots a node's ranks and its replicas have: made, given, and given back."""

import errno
import logging
import os

from elastic.agent import memory
from elastic.agent.checkpoint import Checkpoint, moment_of
from elastic.agent.flushes import Flushes
from elastic.agent.shelf import Shelf, Slot
from elastic.proto import keeper

log = logging.getLogger(__name__)


class Allotment:
    def __init__(self, shelf: Shelf, flushes: Flushes) -> None:
        self._shelf = shelf
        self._flushes = flushes

    def own(self, known: Checkpoint, said: keeper.Open, size: int) -> tuple[list[Slot], str]:
        """Slots of that size for a rank, or why it has none: what fits of those it has, and new ones.
        What is too small goes, but for what is still needed. Raises OSError."""
        own = known.slots.own.get(said.local_rank, [])
        if known.reckoned is None or known.reckoned[0] < size:
            known.reckoned = size, self._reckon(known, said, size)
        size, reckoned = known.reckoned
        fit = [one for one in own if len(one.view) >= size]
        if len(fit) < reckoned.slots:
            for one in [one for one in own if one not in fit]:
                if not self._needed(known, one, own):
                    self._shelf.drop(one)
        while len(fit) < reckoned.slots:
            fit.append(self._shelf.make(known.name, "own", said.local_rank, size))
        return (fit, "") if len(fit) >= memory.FEWEST else ([], reckoned.reason)

    def _reckon(self, known: Checkpoint, said: keeper.Open, size: int) -> memory.Reckoning:
        """The same for all ranks of this node. What other slots have been promised is taken off; what
        this checkpoint has is its own to use again."""
        ranks = said.local_world_size
        reckoned = memory.reckon(
            slot_bytes=size,
            ranks=ranks,
            available=memory.available()
            - self._shelf.untouched
            + sum(len(one.view) for one in known.slots),
            replicas=said.replicate and said.world_size > ranks,
        )
        if reckoned.reason:
            log.warning("checkpoint %s: %s", known.name, reckoned.reason)
        return reckoned

    def _needed(self, known: Checkpoint, one: Slot, own: list[Slot]) -> bool:
        """It holds the newest whole moment, what was loaded, or what is still to go to storage."""
        at = one.moment
        whole = [s.moment for s in own if s.snapshot is not None and s.snapshot.all_units]
        loaded = None if known.answer is None else moment_of(known.answer.moment)
        return at is not None and (
            at == max((m for m in whole if m is not None), default=None)
            or at == loaded
            or at in known.keep
            or self._unwritten(known, one)
        )

    def _unwritten(self, known: Checkpoint, one: Slot) -> bool:
        """What it holds is still to go to storage."""
        snapshot, at = one.snapshot, one.moment
        if snapshot is None or at is None or not snapshot.stamp.persist:
            return False
        written = self._flushes.written.get(known.name, {}).get(at)
        return written is None or snapshot.stamp.rank not in written.shards

    def copy(self, known: Checkpoint, rank: int, size: int) -> Slot | None:
        """A slot for a replica of that rank; None while all that it may have are needed. Raises
        OSError."""
        slots = known.slots.copy.get(rank, [])
        for one in [one for one in slots if one.moment is None or one.moment not in known.lasting]:
            if len(one.view) >= size:
                return one
            self._shelf.drop(one)
        if len(known.slots.copy.get(rank, [])) >= memory.COPIES:
            return None
        if size > memory.available() - self._shelf.untouched:  # the other's may be larger than ours
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return self._shelf.make(known.name, "copy", rank, size)

    def forget_spent(self, known: Checkpoint) -> None:
        """Give back slots that this node has no more to do with, once what replaces them is there:
        replicas of ranks that it keeps none of now, and what ranks held beyond those of this round."""
        ranks = {rank for _, rank in known.fetch}
        spent = [
            slots for rank, slots in known.slots.copy.items() if rank not in ranks and known.keep
        ]
        for client in known.clients:
            if client.said is not None and client.round <= moment_of(known.whole).round:
                here = client.said.local_world_size
                spent += [slots for local, slots in known.slots.own.items() if local >= here]
                break
        for one in [one for slots in spent for one in slots]:
            if one.moment not in known.lasting and not self._unwritten(known, one):
                self._shelf.drop(one)

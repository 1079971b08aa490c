"""Which slots a node's ranks and its replicas have: made, given, and given back."""

import errno
import logging
import os

from elastic.agent.snapshots import memory
from elastic.agent.snapshots.checkpoint import Checkpoint, moment_of
from elastic.agent.snapshots.shelf import Shelf, Slot
from elastic.proto import keeper

log = logging.getLogger(__name__)


class Allotment:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def own(self, known: Checkpoint, said: keeper.Open, size: int) -> tuple[list[Slot], str]:
        """Slots of that size for a rank, or why it has none: what fits of those it has, and new ones.
        What is too small goes, but for what is still needed. Raises OSError."""
        own = known.slots.own.get(said.local_rank, [])
        known.sizes[said.local_rank] = size
        if known.reckoned is None or known.reckoned[0] < size or said.local_rank in known.refused:
            known.reckoned = size, self._reckon(known, said, size)
        size, reckoned = known.reckoned
        fit = [one for one in own if len(one.view) >= size]
        if len(fit) < max(reckoned.slots, memory.FEWEST):
            self._drop_unneeded(known, own, [one for one in own if one not in fit])
        while len(fit) < reckoned.slots:
            fit.append(self._shelf.make(known.name, "own", said.local_rank, size))
        if len(fit) >= memory.FEWEST:
            return fit, ""
        known.refused.add(said.local_rank)
        return [], reckoned.reason

    def shed(self, known: Checkpoint, said: keeper.Open) -> None:
        """A rank has given up its slots, whose pages could not be had."""
        own = known.slots.own.get(said.local_rank, [])
        self._drop_unneeded(known, own, list(own))
        known.reckoned = None

    def _drop_unneeded(self, known: Checkpoint, own: list[Slot], slots: list[Slot]) -> None:
        for one in slots:
            if not self._needed(known, one, own):
                self._shelf.drop(one)

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
        if reckoned.reason and (reckoned.slots or not known.refused):  # else it was said
            log.warning("checkpoint %s: %s", known.name, reckoned.reason)
        elif known.refused and reckoned.slots:
            log.warning("checkpoint %s: there is memory for snapshots again", known.name)
        known.refused.clear()
        return reckoned

    def _needed(self, known: Checkpoint, one: Slot, own: list[Slot]) -> bool:
        """It holds the newest whole moment, what was loaded, or what is still to go to storage."""
        at = one.moment
        newest, loaded = moment_of(known.whole), None
        whole = [
            found.moment
            for found in (s.snapshot for s in own)
            if found is not None and (found.all_units or found.moment == newest)
        ]
        if known.answer is not None and newest.round < known.answer.round:
            loaded = moment_of(known.answer.moment)
        return at is not None and (
            at == max(whole, default=None)
            or at == loaded
            or at in known.keep
            or self._unwritten(known, one)
        )

    def _unwritten(self, known: Checkpoint, one: Slot) -> bool:
        """What it holds is still to go to storage."""
        snapshot = one.snapshot
        if snapshot is None or not snapshot.stamp.persist or snapshot.moment <= known.stored:
            return False
        written = known.flushes.written.get(snapshot.moment)
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

    def forget_unused(self, known: Checkpoint) -> None:
        """Nobody has it open, and others want memory. Where nothing was ever saved, its slots are given back; else they
        are for who goes on with it, as memory that is touched already."""
        if not known.slots.held():
            for one in [one for slots in known.slots.own.values() for one in slots]:
                self._shelf.drop(one)

    def forget_spent(self, known: Checkpoint) -> None:
        """Give back slots that this node has no more to do with, once what replaces them is there:
        replicas of ranks that it keeps none of now, what ranks held beyond those of this round, and
        what has become too small."""
        ranks = {rank for _, rank in known.fetch}
        spent = [
            slots for rank, slots in known.slots.copy.items() if rank not in ranks and known.keep
        ]
        for client in known.clients:
            if client.said is not None and client.round <= moment_of(known.whole).round:
                here = client.said.local_world_size
                spent += [slots for local, slots in known.slots.own.items() if local >= here]
                break
        for local, slots in known.slots.own.items():
            least = known.sizes.get(local, 0)
            self._drop_unneeded(known, slots, [one for one in slots if len(one.view) < least])
        for one in [one for slots in spent for one in slots]:
            if one.moment not in known.lasting and not self._unwritten(known, one):
                self._shelf.drop(one)

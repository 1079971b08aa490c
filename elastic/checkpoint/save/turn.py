"""A save's turn: which of a rank's slots it may write over, and the wait until there is one."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic

from elastic.checkpoint.save.keeping import Keeping
from elastic.checkpoint.save.slots import Content, Draft, Slots, choices
from elastic.checkpoint.state.image import Image
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp

log = logging.getLogger(__name__)

READER_TIME = 0.05
"""Seconds until a slot that is being read or prepared is tried again: nobody tells of the end of that."""
WHOLE_TIMEOUT = 60.0
"""Seconds that a save waits for the others' snapshots to be whole, or for a reader, before it is left out;
the next ones do not wait until one has found a slot."""

WHOLE = "one is whole on every rank"
READ = "a slot is free of readers"
"""What saves may wait for."""


class Turn:
    """Of one save at a time."""

    def __init__(self, name: str, round_: int, keeping: Keeping) -> None:
        """name: of the checkpoint, for what is said."""
        self._name = name
        self._round = round_
        self._keeping = keeping
        self.loaded: Moment | None = None
        """What these ranks went on from."""
        self.blocked = ""
        """What the last save has waited for in vain."""

    def wait(
        self,
        slots: Slots,
        stamp: Callable[[bool, int], Stamp],
        image: Image,
        persist: bool,
    ) -> tuple[Draft, bool] | None:
        """A slot that may be written over; waits for other ranks, and for readers, where none is yet. None
        where that takes too long, as while the master is away: training is worth more. And whether it
        goes to storage: also in the place of one that storage was too slow for."""
        deadline = monotonic() + (0.0 if self.blocked else WHOLE_TIMEOUT)
        while True:
            said = self._keeping.said
            contents = slots.contents()
            self._keeping.drain()  # after the look: what is kept is said before a slot tells of newer
            contents = [self._known(content) for content in contents]
            keep = self._keeping.keep
            free, late = choices(contents, self._round, self.loaded, keep)
            for indices, goes in ((free, persist), (late, True)):
                draft = slots.begin(indices, partial(stamp, goes), image)
                if draft is not None:
                    self.blocked = ""
                    return draft, goes
            comes = slots.awaited([*free, *late])  # what is prepared may be free before
            left = READER_TIME if comes else deadline - monotonic()
            if left <= 0:
                if not self.blocked:
                    self.blocked = READ if free or late else WHOLE
                    log.error("%s: no snapshots until %s", self._name, self.blocked)
                return None
            self._keeping.wait(said, min(left, READER_TIME) if free or late else left)

    def _known(self, content: Content) -> Content:
        """With what the keeper has said. A moment is as good as in every rank's memory where something of
        this round that is no older is on storage: others may have no memory. What another rank has left
        out is worth no wait, unless it is to be persisted after all."""
        moment, stored = content.moment, self._keeping.committed
        if moment is None:
            return content
        of_round = moment.round == self._round
        on_storage = of_round and stored is not None and moment <= stored
        whole = content.whole or moment == self._keeping.whole or on_storage
        if not (whole or content.due) and self._keeping.left_out(moment):
            return Content(moment=None)
        return replace(content, whole=whole, due=content.due and of_round and not on_storage)

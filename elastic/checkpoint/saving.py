"""What a rank's saves need over a run: its slots, and the way there."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import torch

from elastic.checkpoint import ahead, copy_cpu, host, lanes
from elastic.checkpoint.behind import Behind, steady
from elastic.checkpoint.image import Image
from elastic.checkpoint.keeping import Keeping
from elastic.checkpoint.planner import Planner, Share
from elastic.checkpoint.slots import Draft, Slots, early, reusable
from elastic.checkpoint.state import Place, optimizers
from elastic.proto import keeper, slot
from elastic.proto.errors import CheckpointError
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp
from elastic.proto.sums import Chunk

log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 600.0
"""Seconds that a keeper may take to answer: the ranks of a job have to come together for a load."""
READER_TIME = 0.05
"""Seconds until a slot that is being read is tried again: nobody tells of a reader's end."""
WHOLE_TIMEOUT = 60.0
"""Seconds that a save waits for the others' snapshots to be whole, before it is left out; the next ones
do not wait until something is heard."""

SnapshotPath = Literal["auto", "shadow", "stream", "sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What is asked of one."""

    step: int
    persist: bool
    """It is to be written to storage."""
    value: float | None
    """By which the best are kept."""


class Saver:
    """Not for several threads; `ready` may be asked by any."""

    def __init__(
        self, name: str, place: Place, job: str, round_: int, keeping: Keeping, path: SnapshotPath
    ) -> None:
        """name: the checkpoint's, for what is logged; job: the job's own id."""
        self._name = name
        self._place = place
        self._job = job
        self._round = round_
        self._keeping = keeping
        self._planner = Planner(place)
        self.path: SnapshotPath = path
        """How tensors get to host memory; known from the first save on."""
        self.loaded: Moment | None = None
        """What these ranks went on from."""
        self.due: Moment | None = None
        """The last that was to be written to storage."""
        self._threads = host.threads(place.local_world_size)
        self._slots: Slots | None = None
        self._behind: Behind | None = None
        """None while there are only tensors on the CPU, which are copied at once."""
        self._sized = self._was_ready = self._skipped = False
        self._waited_for: int | None = None
        """How much the keeper had said when a save had waited for more in vain."""

    def check(self) -> None:
        """Raise what went wrong behind training."""
        if self._behind is not None:
            self._behind.check()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until all snapshots are in host memory; whether they are."""
        return self._behind is None or self._behind.finish(timeout)

    def close(self) -> None:
        """Wait for what is under way, and give the slots back; the snapshots stay. Raises what went
        wrong with the last ones."""
        if self._slots is not None:
            if self._behind is not None:
                self._behind.leave(self._slots)
            self._slots.close()
            self._slots = None
        if self._behind is not None:
            behind, self._behind = self._behind, None
            behind.close()

    # --- a snapshot --------------------------------------------------------------------------

    def take(self, save: Save, state: Mapping[str, Any]) -> bool:
        """Take one, now or behind training; False where it is left out, for want of memory that is
        ready."""
        self._heed()
        share = self._planner.share(state)
        slots = self._room(share)
        write = partial(self._write, slots, share, save)
        behind = self._behind
        if behind is None:
            self.path = "sync"
            write(partial(copy_cpu.write, share.image, share.tensors, share.values))
            return True
        self._sized = True
        if not self.ready and not self._was_ready and not save.persist:
            if not self._skipped:
                log.info("%s: no snapshots until memory for them is ready", self._name)
            self._skipped = True
            return False
        behind.wait_ready(None, every=False)
        self._was_ready = True
        if self.path == "auto":
            self._choose(behind, share)
        copy = behind.take(share.image, share.values, share.tensors, partial(steady, state))
        self.path = behind.path
        behind.submit(copy, partial(write, copy.run))
        if self.path == "sync":
            behind.finish()
        return True

    def _heed(self) -> None:
        """Divide nothing any more, once ranks of this node have turned out not to hold the same."""
        self._keeping.drain()
        uneven = self._keeping.uneven
        if uneven is not None and not self._planner.apart:
            self._planner.apart = True
            if not self._place.local_rank:
                log.error(
                    "%s: step %d cannot be kept: %s; from now on each rank of this node writes all that "
                    "it has", self._name, uneven.step, uneven.reason,
                )  # fmt: skip

    def _write(
        self,
        slots: Slots,
        share: Share,
        save: Save,
        fill: Callable[[memoryview, int], list[Chunk]],
    ) -> None:
        """Into a slot, and tell the keeper. `fill` fills an image, by so many threads."""

        def stamp(persist: bool, generation: int) -> Stamp:
            return Stamp(
                job=self._job,
                step=save.step,
                round=self._round,
                rank=self._place.rank,
                world_size=self._place.world_size,
                generation=generation,
                local_rank=self._place.local_rank,
                local_world_size=self._place.local_world_size,
                persist=persist,
                value=save.value,
            )

        found = self._wait_for_a_slot(slots, stamp, share.image, save.persist)
        if found is None:
            return
        draft, persist = found
        with draft:
            chunks = fill(draft.image, self._threads)
            draft.commit(chunks, share.units.of(chunks), share.beliefs)
        self._keeping.tell(keeper.Held(slot=draft.index))
        if persist:
            self.due = Moment(self._round, save.step)

    def _wait_for_a_slot(
        self, slots: Slots, stamp: Callable[[bool, int], Stamp], image: Image, persist: bool
    ) -> tuple[Draft, bool] | None:
        """One that may be written over; waits for other ranks, and for readers, where none is yet. None
        where that takes too long, as while the master is away: training is worth more. And whether it
        goes to storage: also in the place of one that storage was too slow for."""
        hopeless = self._keeping.said == self._waited_for
        deadline = monotonic() + (0.0 if hopeless else WHOLE_TIMEOUT)
        while True:
            said = self._keeping.said
            contents = slots.contents()
            self._keeping.drain()  # after the look: what is kept is said before a slot tells of newer
            whole, keep = self._keeping.whole, self._keeping.keep
            contents = [
                replace(c, whole=c.whole or c.moment == whole, due=c.due and self._is_due(c.moment))
                for c in contents
            ]
            order = reusable(contents, self._round, self.loaded, keep)
            if not order and self._behind is not None:
                order = early(contents, self._round, self.loaded)
            late = [index for index in order if contents[index].due]
            for indices, goes in (([i for i in order if i not in late], persist), (late, True)):
                draft = slots.begin(indices, partial(stamp, goes), image)
                if draft is not None:
                    return draft, goes
            left = deadline - monotonic()
            if left <= 0:
                if not hopeless:
                    log.error(
                        "%s: no snapshots until %s", self._name,
                        "a slot is free of readers" if order else "one is whole on every rank",
                    )  # fmt: skip
                self._waited_for = None if order else said
                return None
            self._keeping.wait(said, min(left, READER_TIME) if order else left)

    def _is_due(self, moment: Moment | None) -> bool:
        """Whether a snapshot of this round is not on storage yet."""
        committed = self._keeping.committed
        return (
            moment is not None
            and moment.round == self._round
            and (committed is None or committed < moment)
        )

    # --- memory ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether no snapshot is skipped from here on."""
        if self._behind is None:
            return self._slots is not None or not _cuda()
        return self._sized and self._slots is not None and self._slots.prepared > 0

    def wait_ready(self, timeout: float | None, every: bool) -> bool:
        """Wait until `ready`, if something has begun it; whether it is. every: all slots are."""
        if self._behind is not None and self._sized:
            self._behind.wait_ready(timeout, every=every)
        if every and self._behind is not None and self._slots is not None:
            return self._sized and self._slots.prepared == self._slots.count
        return self.ready

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Begin to make memory for what the state holds."""
        if self.path in ("auto", "sync") and not _cuda():
            return
        try:
            self._room(self._planner.share(state))
        except CheckpointError:
            return  # the first save says it
        self._sized = all(optimizer.state for optimizer in optimizers(dict(state)))

    def _room(self, share: Share) -> Slots:
        """Slots for such images; asked for again where the state has grown."""
        size = slot.bytes_for(share.image.nbytes)
        if self._slots is not None and self._slots.bytes >= size:
            return self._slots
        device = lanes.device_of(list(share.tensors.values()))
        if self._behind is None and (device.type != "cpu" or self.path in ("shadow", "stream")):
            self._behind = Behind(lanes.Host() if device.type == "cpu" else lanes.Cuda(device))
            if self.path != "auto":
                self._behind.path = self.path
        if self._slots is not None:
            if self._behind is not None:
                self._behind.leave(self._slots)
            self._slots.close()
            self._slots = None
        answer, fds = self._keeping.ask(keeper.Need(bytes=size + size // 8), ANSWER_TIMEOUT)
        if not isinstance(answer, keeper.Slots):
            raise CheckpointError("the keeper of this rank's snapshots answers something else")
        if self._behind is None:
            self._slots = Slots(fds, self._threads)
        else:
            self._slots = Slots(fds, self._threads, self._behind.lane)
            ahead.settle(self._slots.views)
            self._behind.prepare(self._slots)
        return self._slots

    def _choose(self, behind: Behind, share: Share) -> None:
        """The way to host memory; what training needs of the device is known by the first save."""
        device = lanes.device_of(list(share.tensors.values()))
        need = share.image.nbytes
        behind.path = "shadow" if lanes.room(device) >= need else "stream"
        size = need / (1 << 30)
        log.info("%s: %s, %.1f GiB of %s a snapshot", self._name, behind.path, size, device)


def _cuda() -> bool:
    """Whether this process uses CUDA; asking does not begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

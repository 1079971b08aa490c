"""What a rank's saves need over a run: its slots, and the way there."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from elastic.checkpoint.memory import copy_cpu, host, lanes
from elastic.checkpoint.save import ahead, writing
from elastic.checkpoint.save.behind import Behind, Void, steady
from elastic.checkpoint.save.keeping import Keeping
from elastic.checkpoint.save.slots import NoMemory, Slots
from elastic.checkpoint.save.turn import WHOLE, Turn
from elastic.checkpoint.save.want import Want
from elastic.checkpoint.state.collect import Place, optimizers
from elastic.checkpoint.state.planner import Planner, Share
from elastic.checkpoint.storage.protocol import Storage, words
from elastic.proto import keeper, manifest, slot
from elastic.proto.errors import CheckpointError
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp
from elastic.proto.sums import Chunk

log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 600.0
"""Seconds that a keeper may take to answer: the ranks of a job have to come together for a load."""
GONE = "its snapshot is gone, and the state may be another by now"
MOST_WORDS = 1000
"""Of a reason that is told."""
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
        self,
        storage: Storage,
        place: Place,
        job: str,
        round_: int,
        keeping: Keeping,
        path: SnapshotPath,
    ) -> None:
        """job: the job's own id."""
        self._storage = storage
        self._name = storage.url
        self._place = place
        self._job = job
        self._round = round_
        self._keeping = keeping
        self._planner = Planner(place)
        self._way = path
        """What was asked for."""
        self.path: SnapshotPath = path
        """How tensors get to host memory; known from the first save on."""
        self.due: Moment | None = None
        """The last that was to be written to storage."""
        self.unwritten = ""
        """Why the last that this rank has written itself is not there."""
        self.substitute = False
        """It was not, but is in the place of one that was."""
        self._asked = self._taken = self._left_out = 0
        """The newest step of this round that was to be saved, that of which there is a snapshot, and that of
        which there is none, as others were told."""
        self._want = Want()
        self._size = 0
        """Bytes of the slots that were asked for last."""
        self._threads = host.threads(place.local_world_size)
        self._slots: Slots | None = None
        self._turn = Turn(storage.url, round_, keeping)
        self._behind: Behind | None = None
        """None while there are only tensors on the CPU, which are copied at once."""
        self._sized = self._was_ready = self._skipped = False
        self._said: set[Moment] = set()
        """What of `Keeping.lost` was."""
        self.failed: set[Moment] = set()
        """What this rank has failed to have persisted, once: of those it need not be told."""

    @property
    def loaded(self) -> Moment | None:
        """What these ranks went on from."""
        return self._turn.loaded

    @loaded.setter
    def loaded(self, moment: Moment | None) -> None:
        self._turn.loaded = moment

    def finish(self, timeout: float | None = None) -> bool:
        """Wait until all snapshots are in host memory; whether they are. Raises what went wrong behind
        training, but for memory that was not to be had."""
        try:
            return self._behind is None or self._behind.finish(timeout)
        except NoMemory as error:
            self._shed(error)
            return True

    def close(self) -> None:
        """Wait for what is under way, and give the slots back; the snapshots stay. Raises what went
        wrong with the last ones."""
        self._give_back()
        if self._behind is not None:
            behind, self._behind = self._behind, None
            with suppress(NoMemory):
                behind.close()

    # --- a snapshot --------------------------------------------------------------------------

    def take(self, save: Save, state: Mapping[str, Any]) -> None:
        """Take one, now or behind training; where there is no memory for it, or none yet, what is to be
        persisted is written to storage here. Raises `CheckpointError` for a step that is not
        beyond the last."""
        self._heed()
        share = self._planner.share(state)
        slots = self._room(share)
        if save.step < max(self._asked, 1):
            last = f", and step {self._asked} is saved" if self._asked else ""
            raise CheckpointError(
                f"{self._name}: step {save.step} cannot be: steps only grow{last}"
            )
        if save.step == self._asked:
            self.finish()
            if save.step == self._taken:
                self._persist(save)
                return
            if save.step == self._left_out:  # others may have written over theirs
                slots = None
        self._asked = save.step
        try:
            if slots is not None and self._snapshot(slots, share, save, state):
                return
        except NoMemory as error:
            self._shed(error)
        if save.persist:
            self._straight(share, save)
        else:
            self._leave_out(save)

    def keep(self, save: Save, state: Mapping[str, Any]) -> str:
        """This process ends in that save, which `take` has taken if it could: see to it that the step is
        in memory, else on storage. Why it cannot be; empty: it is. Raises what went wrong behind."""
        self.finish()
        if self._taken != save.step:
            self._straight(self._planner.share(state), save)
        return "" if self._taken == save.step else self.unwritten

    def _persist(self, save: Save) -> None:
        """A step that is saved again is the same snapshot; it may be one now that goes to storage."""
        moment = Moment(self._round, save.step)
        if not save.persist or self.due == moment:
            return
        if self._slots is not None and self._slots.mark_persist(moment):
            self._keeping.tell(keeper.Held())
            self.due, self.unwritten, self.substitute = moment, "", False
        else:
            self._fails(save, GONE)

    def _straight(self, share: Share, save: Save) -> None:
        """Write it to storage, while training waits."""
        at, number = self._place, save.step
        name = manifest.file(at.rank, at.world_size, self._round, self._job)
        tensors = {name: partial(tensor.detach) for name, tensor in share.tensors.items()}
        try:
            written = writing.write_image(
                self._storage, number, name, at.rank, share.image, tensors, share.values
            )
        except OSError as error:
            self._fails(save, words(error))
            return
        self.unwritten = ""
        self._keeping.tell(
            keeper.Written(
                step=number,
                bytes=written.bytes,
                digest=written.digest,
                value=save.value,
                beliefs=share.beliefs,
            )
        )
        self._taken, self.due, self.substitute = number, Moment(self._round, number), False

    def _fails(self, save: Save, why: str) -> None:
        """What was to be persisted is not; other ranks may wait for it."""
        self.unwritten = f"{self._name}: step {save.step} is not on storage: {why}"
        self.failed.add(Moment(self._round, save.step))
        log.error("%s", self.unwritten)
        self._keeping.tell(keeper.Failed(step=save.step, reason=why[:MOST_WORDS]))

    def _leave_out(self, save: Save) -> None:
        """Others need not wait until theirs is whole."""
        self._left_out = save.step
        self._keeping.tell(keeper.Skipped(step=save.step))

    def _snapshot(self, slots: Slots, share: Share, save: Save, state: Mapping[str, Any]) -> bool:
        """Into a slot; False where none is ready. Raises `NoMemory`."""
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
        behind.check()
        self._was_ready = True
        if self.path == "auto":
            self._choose(behind, share)
        copy = behind.take(share.image, share.values, share.tensors, partial(steady, state))
        self.path = behind.path
        behind.submit(copy, partial(self._late, save, partial(write, copy.run)))
        if self.path == "sync":
            behind.finish()
        return True

    def _late(self, save: Save, write: Callable[[], None]) -> None:
        """`write`, once nobody can write it straight any more: the state has gone on."""
        try:
            write()
        except (NoMemory, Void) as error:
            goes = save.persist or self.due == Moment(self._round, save.step)
            if goes and self.path != "sync":
                self._fails(save, str(error))
            elif self.path != "sync":
                self._leave_out(save)
            raise

    def _heed(self) -> None:
        """Say what is never whole; where that is since ranks of this node do not hold the same, divide
        nothing any more."""
        self._keeping.drain()
        for moment, found in sorted(self._keeping.lost.items()):
            apart = found.apart and not self._planner.apart
            if moment in self._said | self.failed and not apart:
                continue
            self._said.add(moment)
            self._planner.apart |= apart
            then = "; from now on each rank of this node writes all that it has" if apart else ""
            if not self._place.local_rank:
                log.error(
                    "%s: step %d cannot be kept: %s%s", self._name, found.step, found.reason, then
                )

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

        found = self._turn.wait(slots, stamp, share.image, save.persist)
        if found is None:
            if save.persist and self._behind is None and self._turn.blocked == WHOLE:
                self._straight(share, save)
            elif save.persist:
                self._fails(save, f"no snapshots until {self._turn.blocked}")
            else:
                self._leave_out(save)
            return
        draft, persist = found
        if persist:  # from here on: it may be in the place of one that was due
            self.due, self.unwritten = Moment(self._round, save.step), ""
            self.substitute = not save.persist
        with draft:
            chunks = fill(draft.image, self._threads)
            draft.commit(chunks, share.units.of(chunks), share.beliefs)
        self._keeping.tell(keeper.Held())
        self._taken = save.step

    # --- memory ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether no snapshot is skipped from here on."""
        if self._behind is None:
            return self._slots is not None or not (_cuda() or self._want.bytes)
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
        if self._slots is None:
            return
        self._sized = all(optimizer.state for optimizer in optimizers(dict(state)))

    def _room(self, share: Share) -> Slots | None:
        """Slots for such images, asked for again where the state has grown; None where there is no
        memory for them now."""
        size = slot.bytes_for(share.image.nbytes)
        device = lanes.device_of(list(share.tensors.values()))
        first = self._behind is None and (device.type != "cpu" or self._way in ("shadow", "stream"))
        if self._slots is not None and self._slots.bytes >= size and not first:
            return self._slots
        self._give_back()
        if first:
            self._behind = Behind(lanes.Host() if device.type == "cpu" else lanes.Cuda(device))
            self.path = self._way
            if self._way != "auto":
                self._behind.path = self._way
        if not self._want.asks(size):
            self._want = self._want.passed()
            return None
        self._size = size
        answer, fds = self._keeping.ask(keeper.Need(bytes=size + size // 8), ANSWER_TIMEOUT)
        if isinstance(answer, keeper.Refused):  # which the keeper has said
            self._want = self._want.refused(size)
            return None
        if not isinstance(answer, keeper.Slots):
            raise CheckpointError("the keeper of this rank's snapshots answers something else")
        if self._behind is None:
            self._slots = Slots(fds, self._threads)
        else:
            self._slots = Slots(fds, self._threads, self._behind.lane)
            ahead.settle(self._slots.views)
            self._behind.prepare(self._slots)
        moments = [content.moment for content in self._slots.contents()]
        of_round = [at.step for at in moments if at is not None and at.round == self._round]
        if max(of_round, default=0) > self._asked:  # another Checkpointer's
            self._asked = self._taken = max(of_round)
        return self._slots

    def _give_back(self) -> None:
        if self._slots is not None:
            if self._behind is not None:
                self._behind.leave(self._slots)
            self._slots.close()
            self._slots = None

    def _shed(self, error: NoMemory) -> None:
        """There is less memory than there was; the slots go, and are asked for again later."""
        if self._slots is not None:
            log.error("%s: no snapshots until there is memory again: %s", self._name, error)
            self._want = self._want.refused(self._size)
            self._give_back()
            self._keeping.tell(keeper.Shed())
        if self._behind is not None:
            self._behind.forget(NoMemory)

    def _choose(self, behind: Behind, share: Share) -> None:
        """The way to host memory; what training needs of the device is known by the first save."""
        tensors = list(share.tensors.values())
        device = lanes.device_of(tensors)
        need = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
        behind.path = "shadow" if lanes.room(device) >= need else "stream"
        size = need / (1 << 30)
        log.info("%s: %s, %.1f GiB of %s a snapshot", self._name, behind.path, size, device)


def _cuda() -> bool:
    """Whether this process uses CUDA; asking does not begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

"""`Checkpointer`: what a training script holds."""

import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, get_args

import torch

from elastic.checkpoint import (
    claims,
    copy_cpu,
    files,
    host,
    images,
    lanes,
    manifests,
    places,
    storage,
)
from elastic.checkpoint.behind import Behind, optimizers, steady
from elastic.checkpoint.image import Image, header_bytes, lay_out, parse
from elastic.checkpoint.keeping import Keeping
from elastic.checkpoint.peers import Peer, head
from elastic.checkpoint.restore import Restore, Source
from elastic.checkpoint.share import mine, units
from elastic.checkpoint.slots import Draft, Slots, early, reusable
from elastic.checkpoint.state import Place, collect
from elastic.proto import codec, courier, keeper, manifest, slot
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.manifest import Manifest
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp
from elastic.proto.sums import Chunk
from elastic.proto.terms import Retention, Terms

log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 600.0
"""Seconds that the ranks of a job may take to come together for a load."""
READER_TIME = 0.05
"""Seconds until a slot that is being read is tried again: nobody tells of a reader's end."""
WHOLE_TIMEOUT = 60.0
"""Seconds that a save waits for the others' snapshots to be whole, before it is left out; the next ones
do not wait until something is heard."""

SnapshotPath = Literal["auto", "shadow", "stream", "sync"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank writes of a state."""

    image: Image
    tensors: dict[str, torch.Tensor]
    holders: dict[str, tuple[int, ...]]
    values: bytes


class Checkpointer:
    """Saves a state into memory, and loads the newest that every rank has.

        checkpoint = Checkpointer("/data/run")
        state = {"model": model, "optimizer": optimizer}
        start = checkpoint.load(state)
        for step in range(start, total):
            train(step)
            checkpoint.save(step + 1, state)

    Each rank makes one, in the same order if there are several. Not for use by several threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        persist_every: int | None = None,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best: Literal["min", "max"] = "min",
        storage_options: Mapping[str, Any] | None = None,
        snapshot: SnapshotPath = "auto",
        replicate: bool = True,
        replica_bandwidth: int | None = None,
    ) -> None:
        """path: the folder on storage, or a URL of what fsspec speaks (`s3://bucket/run`); it also
        tells two checkpoints of one job apart.

        persist_every: steps whose number is a multiple of it are written to storage as well.
        keep, keep_every, keep_best: which of them stay there: so many of the newest, those whose number
        is a multiple, so many with the best `value` given to `save`, the smallest or (best="max") the
        largest; one rule is enough to stay, as is `pin`. Without any, all stay.
        storage_options: for the storage's driver, such as credentials; what JSON can say.
        snapshot: how tensors get to host memory: "shadow" (copied on their device first), "stream"
        (from where they are, while an optimizer's step waits), "sync" (`save` waits); "auto" is
        "sync" for tensors on the CPU, else "shadow", or "stream" where the device has no room.
        replicate: with several nodes, what would be lost with one is copied to another's memory.
        replica_bandwidth: bytes a second of such copies that each node takes in; None: no limit.
        Without `elastic-run` all ranks wait for each other here. Raises `CheckpointError`, also where
        there is no driver for the path, and `UsageError`.
        """
        rules = {
            "persist_every": persist_every,
            "keep": keep,
            "keep_every": keep_every,
            "keep_best": keep_best,
            "replica_bandwidth": replica_bandwidth,
        }
        for name, number in rules.items():
            if number is not None and number < 1:
                raise CheckpointError(f"{name} is 1 or more, not {number}")
        if snapshot not in get_args(SnapshotPath):
            raise CheckpointError(f"snapshot is one of {', '.join(get_args(SnapshotPath))}")
        if best not in ("min", "max"):
            raise CheckpointError(f'best is "min" or "max", not {best!r}')
        self.path = storage.canonical(path)
        try:
            self.path.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(f"the path {self.path!r} is no UTF-8: choose another") from error
        try:
            options = json.dumps(dict(storage_options or {}))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"storage_options are what JSON can say: {error}") from error
        self._storage = storage.connect(self.path, options)
        retention = Retention(
            last=keep or 0, every=keep_every or 0, best=keep_best or 0, highest=best == "max"
        )
        self._persist_every = persist_every
        self._due: Moment | None = None
        """The last that was to be written to storage."""
        self._complained = ""
        """What was last logged of storage."""
        found, end = places.find(self.path)
        self._session = found
        self._place = Place(
            rank=found.rank,
            world_size=found.world_size,
            local_rank=found.local_rank,
            local_world_size=found.local_world_size,
        )
        self._keeping = Keeping(end)
        self.snapshot: SnapshotPath = snapshot
        """How tensors get to host memory; known from the first save on."""
        self._threads = host.threads(found.local_world_size)
        self._slots: Slots | None = None
        self._behind: Behind | None = None
        """None while there are only tensors on the CPU, which are copied at once."""
        self._sized = self._was_ready = self._skipped = False
        self._waited_for: int | None = None
        """How much the keeper had said when a save had waited for more in vain."""
        self._loaded: Moment | None = None
        self._keeping.tell(
            keeper.opening(
                checkpoint=self.path,
                rank=found.rank,
                world_size=found.world_size,
                local_rank=found.local_rank,
                local_world_size=found.local_world_size,
                terms=Terms(storage_options=options, retention=retention),
                replicate=replicate,
                bandwidth=replica_bandwidth,
            )
        )

    # --- save --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        persist: bool | None = None,
        value: SupportsFloat | None = None,
    ) -> None:
        """Snapshot `state` as that of `step` finished steps; on return it may change.

        Tensors on the CPU are in their slot by then; those on a device get there behind training,
        and until `ready`, a snapshot of them is only taken where it is to be persisted.
        persist: write it to storage too, in the background; None: if it is due by `persist_every`.
        value: by which the best are kept, such as a loss, the same on every rank; one that is not
        finite is none.
        Raises `CheckpointError` for what a checkpoint cannot keep, where no memory is to be had, and
        for what went wrong with an earlier snapshot.
        """
        if persist is None:
            persist = self._persist_every is not None and step % self._persist_every == 0
        number = None if value is None or not math.isfinite(value) else float(value)
        self._complain_of_storage()
        if self._behind is not None:
            self._behind.check()
        if self._snapshot(step, state, persist, number):
            self._keeping.stay(step)

    def _snapshot(
        self, step: int, state: Mapping[str, Any], persist: bool, number: float | None
    ) -> bool:
        """Take one, now or behind training; False where it is left out, for want of memory that is ready."""
        share = self._share(state)
        slots = self._room(share)
        write = partial(self._write, slots, share, step, persist, number)
        behind = self._behind
        if behind is None:
            self.snapshot = "sync"
            write(partial(copy_cpu.write, share.image, share.tensors, share.values))
            return True
        self._sized = True
        if not self.ready and not self._was_ready and not persist:
            if not self._skipped:
                log.info("%s: no snapshots until memory for them is ready", self.path)
            self._skipped = True
            return False
        behind.wait_ready(None)
        self._was_ready = True
        if self.snapshot == "auto":
            self._choose(behind, share)
        copy = behind.take(share.image, share.values, share.tensors, steady(state))
        self.snapshot = behind.path
        behind.submit(copy, partial(write, copy.run))
        if self.snapshot == "sync":
            behind.finish()
        return True

    def _share(self, state: Mapping[str, Any]) -> Share:
        """What this rank writes."""
        collected = collect(state, self._place)
        parts = {part.piece.name: part for part in mine(collected.parts.values(), self._place)}
        values = collected.values.encode()
        ties = {name: other for name, other in collected.ties.items() if other in parts}
        return Share(
            image=lay_out([part.piece for part in parts.values()], ties, len(values)),
            tensors={name: part.tensor for name, part in parts.items()},
            holders={name: part.holders for name, part in parts.items()},
            values=values,
        )

    def _write(
        self,
        slots: Slots,
        share: Share,
        step: int,
        persist: bool,
        value: float | None,
        fill: Callable[[memoryview, int], list[Chunk]],
    ) -> None:
        """Into a slot, and tell the keeper. `fill` fills an image, by so many threads."""

        def stamp(persist: bool, generation: int) -> Stamp:
            return Stamp(
                job=self._session.job,
                step=step,
                round=self._session.round,
                rank=self._place.rank,
                world_size=self._place.world_size,
                generation=generation,
                local_rank=self._place.local_rank,
                local_world_size=self._place.local_world_size,
                persist=persist,
                value=value,
            )

        found = self._wait_for_a_slot(slots, stamp, share.image, persist)
        if found is None:
            return
        draft, persist = found
        with draft:
            chunks = fill(draft.image, self._threads)
            draft.commit(chunks, units(share.image, share.holders, chunks))
        self._keeping.tell(keeper.Held(slot=draft.index))
        if persist:
            self._due = Moment(self._session.round, step)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all snapshots are in host memory, and what was to be written to storage is there,
        committed.

        Raises `CheckpointError` when that takes longer than `timeout` seconds, and for what went wrong.
        """
        over = None if timeout is None else monotonic() + timeout
        if self._behind is not None and not self._behind.finish(timeout):
            raise CheckpointError(f"{self.path}: the last snapshot is not in host memory yet")
        while True:
            said = self._keeping.said
            self._keeping.drain()
            if self._due is None or (self._keeping.committed or Moment(0, 0)) >= self._due:
                return
            left = 3600.0 if over is None else over - monotonic()
            if left <= 0 or self._keeping.stalled:
                why = f": {self._keeping.stalled}" if self._keeping.stalled else ""
                raise CheckpointError(
                    f"{self.path}: step {self._due.step} is not on storage yet{why}"
                )
            self._keeping.wait(said, left)

    def _complain_of_storage(self) -> None:
        """Once for each reason."""
        if self._keeping.stalled != self._complained:
            self._complained = self._keeping.stalled
            if self._complained and not self._place.local_rank:
                log.error("%s: not on storage yet: %s", self.path, self._complained)

    # --- storage -----------------------------------------------------------------------------

    @property
    def latest(self) -> int | None:
        """The step that was committed to storage last; None: none was. Looks there."""
        try:
            found = manifests.committed(self._storage)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {storage.words(error)}") from error
        return None if found is None else found.step

    def pin(self, step: int, on: bool = True) -> None:
        """Keep a step on storage, whatever the rules say, also in later runs; or, `on=False`, no more.

        Raises `CheckpointError` where that step is not on storage.
        """
        try:
            if on:
                manifests.read(self._storage, step)
                self._storage.publish(step, manifest.PIN, b"pinned\n", over=True)
            else:
                self._storage.delete(step, [manifest.PIN])
            manifests.read(self._storage, step)  # it is still there
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path} has no step {step}: it cannot be pinned") from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: {storage.words(error)}") from error

    # --- memory ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether no snapshot is skipped from here on. For tensors on a device that takes memory for the
        first of their slots, which is prepared behind training from `load` on; how much, an optimizer
        that has no state yet tells at the first `save`."""
        if self._behind is None:
            return self._slots is not None or not _cuda()
        return self._sized and self._slots is not None and self._slots.ready

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until `ready`, if a `load` or `save` has begun it; whether it is."""
        if self._behind is not None and self._sized:
            self._behind.wait_ready(timeout)
        return self.ready

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Begin to make memory for what the state holds."""
        if self.snapshot in ("auto", "sync") and not _cuda():
            return
        try:
            self._room(self._share(state))
        except CheckpointError:
            return  # the first save says it
        self._sized = all(optimizer.state for optimizer in optimizers(state))

    def _room(self, share: Share) -> Slots:
        """Slots for such images; asked for again where the state has grown."""
        size = slot.bytes_for(share.image.nbytes)
        if self._slots is not None and self._slots.bytes >= size:
            return self._slots
        device = lanes.device_of(list(share.tensors.values()))
        if self._behind is None and (device.type != "cpu" or self.snapshot in ("shadow", "stream")):
            self._behind = Behind(lanes.Host() if device.type == "cpu" else lanes.Cuda(device))
            if self.snapshot != "auto":
                self._behind.path = self.snapshot
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
            self._slots = Slots(fds, self._threads, self._behind.register)
            self._behind.prepare(self._slots)
        return self._slots

    def _choose(self, behind: Behind, share: Share) -> None:
        """The way to host memory; what training needs of the device is known by the first save."""
        device = lanes.device_of(list(share.tensors.values()))
        need = share.image.nbytes
        behind.path = "shadow" if lanes.room(device) >= need else "stream"
        size = need / (1 << 30)
        log.info("%s: %s, %.1f GiB of %s a snapshot", self.path, behind.path, size, device)

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
            order = reusable(contents, self._session.round, self._loaded, keep)
            if not order and self._behind is not None:
                order = early(contents, self._session.round, self._loaded)
            late = [index for index in order if contents[index].due]
            for indices, goes in (([i for i in order if i not in late], persist), (late, True)):
                draft = slots.begin(indices, partial(stamp, goes), image)
                if draft is not None:
                    return draft, goes
            left = deadline - monotonic()
            if left <= 0:
                if not hopeless:
                    log.error(
                        "%s: no snapshots until %s", self.path,
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
            and moment.round == self._session.round
            and (committed is None or committed < moment)
        )

    # --- load --------------------------------------------------------------------------------

    def load(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        only: Collection[str] | None = None,
    ) -> int:
        """Load the newest snapshot that every rank can have, or that of `step`; returns its step.

        0 where there is none: the state is as it was. All ranks must call it. strict: raise
        `CheckpointError` for what the state has and the checkpoint has not. only: what is loaded,
        by names or their beginnings ("model", "model.layers.0"); the rest stays as it is.
        """
        if self._behind is not None:
            self._behind.finish()
        stored, unreadable = self._stored(step) if self._place.rank == 0 else (None, "")
        asked = keeper.Load(step=step)
        if stored is not None:
            asked = keeper.Load(
                step=step,
                stored_round=stored.round,
                stored_step=stored.step,
                stored_job=stored.job,
            )
        answer, fds = self._keeping.ask(asked, ANSWER_TIMEOUT)
        try:
            if not isinstance(answer, keeper.Restore):
                raise CheckpointError("the keeper of this rank's snapshots answers something else")
            if not answer.step:
                if unreadable:
                    raise CheckpointError(unreadable)
                if step:
                    raise CheckpointError(f"{self.path} has no step {step}")
            else:
                if step not in (None, answer.step):
                    raise CheckpointError(
                        f"{self.path}: this round has loaded step {answer.step}: to go to {step}, "
                        f"elasticctl restart --from {step}"
                    )
                self._loaded = Moment(answer.round, answer.step)
                here = fds[: answer.images]
                elsewhere = None
                if answer.elsewhere:
                    elsewhere = codec.loads(keeper.Sources, os.pread(fds[-1], 1 << 30, 0))
                with claims.shared(here):
                    if answer.from_memory:
                        self._restore_memory(state, here, elsewhere, strict, only)
                    else:
                        self._restore_files(state, strict, only)
            self._prepare(state)
            return answer.step
        finally:
            for fd in fds:
                os.close(fd)

    def _stored(self, step: int | None) -> tuple[Manifest | None, str]:
        """What storage has to load, as rank 0 sees it for all; and why that cannot be told."""
        try:
            found, wrong = files.newest(self._storage, step)
        except (OSError, CheckpointError) as error:
            return None, f"{self.path}: {storage.words(error)}"
        for complaint in wrong:
            log.error("%s", complaint)
        return found, ""

    def _restore_memory(
        self,
        state: dict[str, Any],
        fds: Sequence[int],
        elsewhere: keeper.Sources | None,
        strict: bool,
        only: Collection[str] | None,
    ) -> None:
        """From the slots of this node, and from other nodes what it has not; their second copies are
        asked only for what turns out to be damaged here."""
        assert self._loaded is not None
        found, damaged = images.sources(fds, self._loaded)
        lost = damaged.get(self._place.rank, "")
        for complaint in damaged.values():
            log.error("%s", complaint)
        with ExitStack() as opened:
            needed = self._peers(elsewhere, opened, needed=True)
            try:
                self._apply({**needed, **found}, state, strict, only, lost)
            except CheckpointError as error:
                second = self._peers(elsewhere, opened, needed=False)
                if not second:
                    raise
                log.error("%s: other nodes have copies", error)
                self._apply({**found, **needed, **second}, state, strict, only, lost)

    def _restore_files(
        self, state: dict[str, Any], strict: bool, only: Collection[str] | None
    ) -> None:
        assert self._loaded is not None
        try:
            found, wrong = files.sources(self._storage, self._loaded.step)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {storage.words(error)}") from error
        for complaint in wrong:
            log.error("%s", complaint)
        same_world = len(found) + len(wrong) == self._place.world_size
        damaged = list(wrong)
        try:
            lost = "; ".join(wrong) if same_world else ""
            self._apply(found, state, strict, only, lost, damaged)
        except CheckpointError as error:
            if not damaged:
                raise
            older = files.older(self._storage, self._loaded.step)
            raise CheckpointError(f"{error}{older}") from error

    def _apply(
        self,
        found: Mapping[int, Source],
        state: dict[str, Any],
        strict: bool,
        only: Collection[str] | None,
        lost: str,
        damaged: list[str] | None = None,
    ) -> None:
        """From images by rank, the own one first. lost: what is wrong with the own image where it cannot
        be used; damaged: takes what else is found to be."""
        own = self._place.rank
        if lost and own not in found:  # nobody can tell who else has the values that were in it
            raise CheckpointError(f"{lost}: what rank {own} alone had is lost")
        order = sorted(found, key=lambda rank: (rank != own, rank))
        restore = Restore([found[rank] for rank in order], self._place, only)
        try:
            restore.apply(state, strict=strict)
        finally:
            if damaged is not None:
                damaged += restore.damaged
            for complaint in restore.damaged:
                log.error("%s", complaint)

    def _peers(
        self, elsewhere: keeper.Sources | None, opened: ExitStack, *, needed: bool
    ) -> dict[int, Source]:
        """Images in the memory of other nodes, by rank, until `opened` ends; without those that cannot
        be had, of which others may have copies."""
        assert self._loaded is not None
        if elsewhere is None:
            return {}
        where = {
            rank: courier.address(source.base, self.path, self._loaded, rank)
            for source in elsewhere.sources
            for rank in source.ranks
            if source.needed == needed
        }

        def look(rank: int) -> Source | None:
            try:
                peer = Peer(where[rank], elsewhere.tls)
                opened.callback(peer.close)
                return _remote(peer, rank)
            except (OSError, CheckpointError) as error:
                log.error("%s", error)
                return None

        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(where, pool.map(look, where), strict=True))
        return {rank: source for rank, source in found.items() if source is not None}

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the snapshot that is under way, and give slots and keeper back; the snapshots stay.

        Raises `CheckpointError` for what went wrong with the last ones.
        """
        try:
            if self._slots is not None:
                if self._behind is not None:
                    self._behind.leave(self._slots)
                self._slots.close()
                self._slots = None
            if self._behind is not None:
                behind, self._behind = self._behind, None
                behind.close()
        finally:
            self._keeping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _remote(peer: Peer, rank: int) -> Source:
    """An image in another node's memory. Raises `CheckpointError`."""
    where = f"the memory of another node (rank {rank})"
    try:
        _, found, chunks = head(peer)
        length = header_bytes(peer.read(0, 8))
        image = parse(bytes(peer.read(0, length)), found.image_bytes)
        source = Source(where=where, image=image, reader=peer, chunks=chunks)
        if not source.intact(0, length):
            raise SlotError("its header is damaged")
    except (OSError, SlotError, ProtocolMismatch) as error:
        raise CheckpointError(f"{where}: {error}") from error
    return source


def _cuda() -> bool:
    """Whether this process uses CUDA; asking does not begin it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

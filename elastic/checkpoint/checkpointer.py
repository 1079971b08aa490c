"""`Checkpointer`: what a training script holds."""

import json
import logging
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat

from elastic import session
from elastic.checkpoint import copy_cpu, files, manifests, share, storage
from elastic.checkpoint.image import Image, header_bytes, lay_out, parse
from elastic.checkpoint.keeping import Keeping
from elastic.checkpoint.peers import Peer, head
from elastic.checkpoint.restore import Mapped, Restore, Source
from elastic.checkpoint.slots import Slots, reusable
from elastic.checkpoint.state import Place, collect
from elastic.proto import codec, courier, keeper, manifest, slot
from elastic.proto.courier import Tls
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.manifest import Manifest
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp
from elastic.proto.sums import Chunk
from elastic.proto.terms import Retention, Terms

log = logging.getLogger(__name__)

ANSWER_TIMEOUT = 600.0
"""Seconds that the ranks of a job may take to come together for a load."""
WHOLE_TIMEOUT = 60.0
"""Seconds that a save waits for the others' snapshots to be whole, before this one is left out."""


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
        replicate: with several nodes, what would be lost with one is copied to another's memory.
        replica_bandwidth: bytes a second of such copies that each node takes in; None: no limit.
        Raises `CheckpointError` outside `elastic-run`, and where there is no driver for the path.
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
        found, end = session.current(), session.open_keeper()
        if found is None or end is None:
            raise CheckpointError("a Checkpointer needs elastic-run: start this script with it")
        self._session = found
        self._place = Place(
            rank=found.rank,
            world_size=found.world_size,
            local_rank=found.local_rank,
            local_world_size=found.local_world_size,
        )
        self._keeping = Keeping(end)
        self._slots: Slots | None = None
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

        persist: write it to storage too, in the background; None: if it is due by `persist_every`.
        value: by which the best are kept, such as a loss, the same on every rank; one that is not
        finite is none.
        Raises `CheckpointError` for what a checkpoint cannot keep, and where no memory is to be had.
        """
        if persist is None:
            persist = self._persist_every is not None and step % self._persist_every == 0
        number = None if value is None or not math.isfinite(value) else float(value)
        collected = collect(state, self._place)
        parts = {
            part.piece.name: part for part in share.mine(collected.parts.values(), self._place)
        }
        values = collected.values.encode()
        ties = {name: other for name, other in collected.ties.items() if other in parts}
        image = lay_out([part.piece for part in parts.values()], ties, len(values))
        tensors = {name: part.tensor for name, part in parts.items()}
        holders = {name: part.holders for name, part in parts.items()}
        slots = self._room(slot.bytes_for(image.nbytes))

        def fill(out: memoryview) -> tuple[list[Chunk], tuple[int, ...]]:
            chunks = copy_cpu.write(image, tensors, values, out)
            return chunks, share.units(image, holders, chunks)

        def stamp(generation: int) -> Stamp:
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
                value=number,
            )

        deadline = monotonic() + WHOLE_TIMEOUT
        while (index := slots.write(self._wait_for_a_slot(slots), stamp, image, fill)) is None:
            if not self._keeping.wait(deadline - monotonic()):
                raise CheckpointError(f"{self.path}: every slot is being read")
        self._keeping.tell(keeper.Held(slot=index))
        if persist:
            self._due = Moment(self._session.round, step)
        if self._keeping.stalled != self._complained:
            self._complained = self._keeping.stalled
            if self._complained and not self._place.local_rank:
                log.error("%s: not on storage yet: %s", self.path, self._complained)
        self._keeping.stay(step)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until what was to be written to storage is there, committed.

        Raises `CheckpointError` when that takes longer than `timeout` seconds, and when storage fails;
        it is tried again behind, all the same.
        """
        over = None if timeout is None else monotonic() + timeout
        self._keeping.drain()
        while self._due is not None and (self._keeping.committed or Moment(0, 0)) < self._due:
            left = 3600.0 if over is None else over - monotonic()
            if left <= 0 or self._keeping.stalled:
                why = f": {self._keeping.stalled}" if self._keeping.stalled else ""
                raise CheckpointError(
                    f"{self.path}: step {self._due.step} is not on storage yet{why}"
                )
            self._keeping.wait(left)

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

    def _room(self, size: int) -> Slots:
        """Slots of at least that size; asked for again where the state has grown."""
        if self._slots is not None and self._slots.bytes >= size:
            return self._slots
        answer, fds = self._keeping.ask(keeper.Need(bytes=size + size // 8), ANSWER_TIMEOUT)
        if not isinstance(answer, keeper.Slots):
            raise CheckpointError("the keeper of this rank's snapshots answers something else")
        if self._slots is not None:
            self._slots.close()
        self._slots = Slots(fds)
        return self._slots

    def _wait_for_a_slot(self, slots: Slots) -> list[int]:
        """Slots that may be written over; waits for other ranks where none is yet."""
        deadline = monotonic() + WHOLE_TIMEOUT
        while True:
            contents = slots.contents()
            self._keeping.drain()  # after the look: what is kept is said before a slot tells of newer
            whole, keep = self._keeping.whole, self._keeping.keep
            contents = [replace(c, whole=c.whole or c.moment == whole) for c in contents]
            order = reusable(contents, self._session.round, self._loaded, keep)
            if order:
                return order
            if not self._keeping.wait(deadline - monotonic()):
                raise CheckpointError(
                    f"{self.path}: no snapshot became whole on every rank for {WHOLE_TIMEOUT:g} s"
                )

    # --- load --------------------------------------------------------------------------------

    def load(self, state: dict[str, Any], *, step: int | None = None, strict: bool = True) -> int:
        """Load the newest snapshot that every rank can have, or that of `step`; returns its step.

        0 where there is none: the state is as it was. All ranks must call it. strict: raise
        `CheckpointError` for what the state has and the checkpoint has not.
        """
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
                return 0
            self._loaded = Moment(answer.round, answer.step)
            images = fds[: answer.images]
            elsewhere = None
            if answer.elsewhere:
                elsewhere = codec.loads(keeper.Sources, os.pread(fds[-1], 1 << 30, 0))
            claims = [slot.claim(fd, exclusive=False) for fd in images]
            try:
                if answer.from_memory:
                    self._restore_memory(state, images, elsewhere, strict)
                else:
                    self._restore_files(state, strict)
            finally:
                for claim in claims:
                    if claim is not None:
                        os.close(claim)
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
    ) -> None:
        """From the slots of this node, and from other nodes what it has not; their second copies are
        asked only for what turns out to be damaged here."""
        assert self._loaded is not None
        found = dict(s for fd in fds if (s := _source(fd, self._loaded)) is not None)
        needed = {} if elsewhere is None else self._peers(elsewhere, needed=True)
        restore = self._restore({**needed, **found})
        try:
            restore.apply(state, strict=strict)
        except CheckpointError as error:
            second = {} if elsewhere is None else self._peers(elsewhere, needed=False)
            if not second:
                raise
            log.error("%s: other nodes have copies", error)
            self._restore({**found, **needed, **second}).apply(state, strict=strict)
        finally:
            _complain(restore)

    def _restore_files(self, state: dict[str, Any], strict: bool) -> None:
        assert self._loaded is not None
        try:
            found, wrong = files.sources(self._storage, self._loaded.step)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {storage.words(error)}") from error
        for complaint in wrong:
            log.error("%s", complaint)
        restore = self._restore(found)
        try:
            restore.apply(state, strict=strict)
        except CheckpointError as error:
            if not (wrong or restore.damaged):
                raise
            older = files.older(self._storage, self._loaded.step)
            raise CheckpointError(f"{error}{older}") from error
        finally:
            _complain(restore)

    def _restore(self, found: Mapping[int, Source]) -> Restore:
        """From images by rank, the own one first."""
        own = self._place.rank
        order = sorted(found, key=lambda rank: (rank != own, rank))
        return Restore([found[rank] for rank in order], self._place)

    def _peers(self, elsewhere: keeper.Sources, *, needed: bool) -> dict[int, Source]:
        """Images in the memory of other nodes, by rank."""
        assert self._loaded is not None
        where = {
            rank: courier.address(source.base, self.path, self._loaded, rank)
            for source in elsewhere.sources
            for rank in source.ranks
            if source.needed == needed
        }
        with ThreadPoolExecutor(8) as pool:
            opened = pool.map(lambda rank: _remote(where[rank], rank, elsewhere.tls), where)
            return dict(zip(where, opened, strict=True))

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Give slots and keeper back; the snapshots stay."""
        if self._slots is not None:
            self._slots.close()
            self._slots = None
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


def _complain(restore: Restore) -> None:
    for complaint in restore.damaged:
        log.error("%s", complaint)


def _source(fd: int, moment: Moment | None) -> tuple[int, Source] | None:
    """The rank and the image of a slot, if it holds that moment, whole."""
    view = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
    try:
        snapshot = slot.read(view)
    except (SlotError, ProtocolMismatch):
        return None
    if Moment(snapshot.stamp.round, snapshot.stamp.step) != moment:
        return None
    length = header_bytes(snapshot.image[:8])
    image: Image = parse(bytes(snapshot.image[:length]), len(snapshot.image))
    source = Source(
        where=f"the slot of rank {snapshot.stamp.rank}",
        image=image,
        reader=Mapped(snapshot.image),
        chunks=snapshot.chunks,
    )
    return snapshot.stamp.rank, source


def _remote(address: str, rank: int, tls: Tls | None) -> Source:
    """An image in another node's memory. Raises `CheckpointError`."""
    where = f"the memory of another node (rank {rank})"
    try:
        peer = Peer(address, tls)
        _, found, chunks = head(peer)
        length = header_bytes(peer.read(0, 8))
        image = parse(bytes(peer.read(0, length)), found.image_bytes)
    except (OSError, SlotError, ProtocolMismatch) as error:
        raise CheckpointError(f"{where}: {error}") from error
    return Source(where=where, image=image, reader=peer, chunks=chunks)

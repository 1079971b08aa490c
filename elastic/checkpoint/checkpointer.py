"""`Checkpointer`: what a training script holds."""

import contextlib
import json
import logging
import math
import os
from collections.abc import Collection, Mapping
from time import monotonic
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, SupportsFloat, get_args

from elastic import session
from elastic.checkpoint import arguments
from elastic.checkpoint.keeper import places
from elastic.checkpoint.load import files
from elastic.checkpoint.load.loading import Loading, looked
from elastic.checkpoint.save import claims
from elastic.checkpoint.save.keeping import Keeping
from elastic.checkpoint.save.saving import ANSWER_TIMEOUT, Save, Saver, SnapshotPath
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import words
from elastic.proto import codec, keeper, manifest
from elastic.proto.errors import CheckpointDamaged, CheckpointError
from elastic.proto.moment import Moment
from elastic.proto.phases import PERSISTING
from elastic.proto.terms import Retention, Terms

log = logging.getLogger(__name__)

MOST_WORDS = 500
"""Characters of what is damaged that the master hears."""


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
        read_only: bool = False,
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
        read_only: to load alone, such as what another run has saved: it takes no memory for snapshots, and
        `elasticctl restart --from` asks for no step of it.
        Without `elastic-run` all ranks wait for each other here. Raises `CheckpointError`, also where
        there is no driver for the path, and `UsageError`.
        """
        persist_every = arguments.rule("persist_every", persist_every)
        keep = arguments.rule("keep", keep)
        keep_every = arguments.rule("keep_every", keep_every)
        keep_best = arguments.rule("keep_best", keep_best)
        replica_bandwidth = arguments.rule("replica_bandwidth", replica_bandwidth)
        if snapshot not in get_args(SnapshotPath):
            raise CheckpointError(f"snapshot is one of {', '.join(get_args(SnapshotPath))}")
        if best not in ("min", "max"):
            raise CheckpointError(f'best is "min" or "max", not {best!r}')
        self.path = arguments.place(path)
        try:
            options = json.dumps(dict(storage_options or {}))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"storage_options are what JSON can say: {error}") from error
        self._storage = connect(self.path, options)
        retention = Retention(
            last=keep or 0, every=keep_every or 0, best=keep_best or 0, highest=best == "max"
        )
        self._persist_every = persist_every
        self._read_only = read_only
        self._complained: set[str] = set()
        """What was logged of storage since the last commit."""
        self._committed: Moment | None = None
        """What was, when that was looked at."""
        found, end = places.find(self.path)
        self._session = found
        self._place = Place(
            rank=found.rank,
            world_size=found.world_size,
            local_rank=found.local_rank,
            local_world_size=found.local_world_size,
        )
        self._keeping = Keeping(end)
        self._saver = Saver(
            self._storage, self._place, found.uid, found.round, self._keeping, snapshot
        )
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
                read_only=read_only,
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
        and until `ready`, a snapshot of them is only taken where it is to be persisted. Where there is no
        memory for snapshots they are left out, until there is; what is to be persisted is then
        written to storage before this returns, as is the step at which a planned end of the round waits.
        step: greater than the last of this run; the same again is the same snapshot, which only
        `persist` may add to.
        persist: write it to storage too, in the background; None: if it is due by `persist_every`.
        value: by which the best are kept, such as a loss, the same on every rank; one that is not
        finite is none.
        Raises `CheckpointError` for what a checkpoint cannot keep, for a step that is not greater, for
        one that is `read_only`, and for what went wrong with an earlier snapshot.
        """
        self._check_writable()
        step = arguments.whole("a step", step)
        arguments.named(state)
        if persist is None:
            persist = self._persist_every is not None and step % self._persist_every == 0
        number = None if value is None or not math.isfinite(value) else float(value)
        self._complain_of_storage()
        self._saver.finish(0)
        save = Save(step=step, persist=persist, value=number)
        self._saver.take(save, state)
        self._keeping.stay(step, lambda: self._saver.keep(save, state))

    def _check_writable(self) -> None:
        if self._read_only:
            raise CheckpointError(f"{self.path} is opened read_only: nothing is changed there")

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all snapshots are in host memory, and what was to be written to storage is there,
        committed.

        Raises `CheckpointError` when that takes longer than `timeout` seconds, and for what went wrong.
        """
        with session.in_phase(PERSISTING):
            self._wait(None if timeout is None else monotonic() + timeout)

    def _wait(self, over: float | None) -> None:
        if not self._saver.finish(None if over is None else max(0.0, over - monotonic())):
            raise CheckpointError(f"{self.path}: the last snapshot is not in host memory yet")
        if self._saver.unwritten:
            raise CheckpointError(self._saver.unwritten)
        before = None
        while True:
            said = self._keeping.said
            self._keeping.drain()
            due, stalled = self._saver.due, self._keeping.stalled
            if due is None or (self._keeping.committed or Moment(0, 0)) >= due:
                return
            lost = self._keeping.lost.get(due)
            own = f"rank {self._place.rank}: "  # before it was saved again
            if lost is not None and not (due in self._saver.failed and lost.reason.startswith(own)):
                raise CheckpointError(
                    f"{self.path}: step {due.step} cannot be kept: {lost.reason}; save a later one"
                )
            if self._saver.substitute and self._keeping.left_out(due):
                raise CheckpointError(
                    f"{self.path}: step {due.step}, in the place of one that storage was too slow for, was "
                    "left out by a rank; save a later one"
                )
            left = 3600.0 if over is None else over - monotonic()
            fails = stalled.reason and before not in (None, stalled)  # since we wait
            if left <= 0 or fails or (stalled.lost or Moment(0, 0)) >= due:
                why = f": {stalled.reason}" if stalled.reason else ""
                raise CheckpointError(f"{self.path}: step {due.step} is not on storage yet{why}")
            before = stalled
            self._keeping.wait(said, left)

    def _complain_of_storage(self) -> None:
        """Once for each reason, until something is committed."""
        if self._keeping.committed != self._committed:
            self._committed = self._keeping.committed
            self._complained.clear()
        reason = self._keeping.stalled.reason
        if reason and reason not in self._complained:
            self._complained.add(reason)
            if not self._place.local_rank:
                log.error("%s: not on storage yet: %s", self.path, reason)

    # --- storage -----------------------------------------------------------------------------

    @property
    def latest(self) -> int | None:
        """The step that was committed to storage last; None: none was. Looks there."""
        try:
            found = manifests.committed(self._storage)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {words(error)}") from error
        return None if found is None else found.step

    def pin(self, step: int, on: bool = True) -> None:
        """Keep a step on storage, whatever the rules say, also in later runs; or, `on=False`, no more.

        Raises `CheckpointError` where that step is not on storage, and for a checkpoint that is `read_only`.
        """
        self._check_writable()
        step = arguments.whole("a step", step)
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
            raise CheckpointError(f"{self.path}: {words(error)}") from error

    # --- memory ------------------------------------------------------------------------------

    @property
    def snapshot(self) -> SnapshotPath:
        """How tensors get to host memory; known from the first save on."""
        return self._saver.path

    @property
    def ready(self) -> bool:
        """Whether no snapshot is skipped from here on. For tensors on a device that takes memory for the
        first of their slots, which is prepared behind training from `load` on; how much, an optimizer
        that has no state yet tells at the first `save`."""
        return self._saver.ready

    def wait_ready(self, timeout: float | None = None, *, every: bool = False) -> bool:
        """Wait until `ready`, if a `load` or `save` has begun it; whether it is.

        every: until all slots are, not only the first; a save that needs one before that waits for it.
        """
        return self._saver.wait_ready(timeout, every)

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
        by names or their beginnings ("model", "model.layers.0"); the rest stays as it is. What was
        saved since the ranks were started is only gone back behind by `elasticctl restart --from`.
        """
        arguments.named(state)
        if isinstance(only, str):  # whose letters would be names
            raise CheckpointError(f"only is a list of names: [{only!r}]")
        if step is not None:
            step = arguments.whole("a step", step)
            if step < 1:
                raise CheckpointError(f"steps are counted from 1: step {step} cannot be loaded")
        self._saver.finish()
        answer, fds = self._keeping.ask(keeper.Load(step=step), ANSWER_TIMEOUT)
        while isinstance(answer, keeper.Look):
            found = looked(self.path, self._storage, step, self._session.uid, answer.damaged)
            answer, fds = self._keeping.ask(found, ANSWER_TIMEOUT)
        try:
            if not isinstance(answer, keeper.Restore):
                raise CheckpointError("the keeper of this rank's snapshots answers something else")
            if answer.error:
                raise CheckpointError(answer.error)
            if answer.step:
                self._restore(state, answer, fds, step, strict, only)
            elif step:
                raise CheckpointError(f"{self.path} has no step {step}")
            if not self._read_only:
                self._saver.prepare(state)
            return answer.step
        finally:
            for fd in fds:
                os.close(fd)

    def _restore(
        self,
        state: dict[str, Any],
        answer: keeper.Restore,
        fds: list[int],
        step: int | None,
        strict: bool,
        only: Collection[str] | None,
    ) -> None:
        """What the keeper has answered; fds: of images, and of where others are."""
        if step not in (None, answer.step):
            raise CheckpointError(
                f"{self.path}: rank 0 loads {answer.step}, this one step {step}: all load the same"
            )
        moment = Moment(answer.round, answer.step)
        self._saver.loaded = moment
        here = fds[: answer.images]
        elsewhere = None
        if answer.elsewhere:
            elsewhere = codec.loads(keeper.Sources, os.pread(fds[-1], 1 << 30, 0))
        loading = Loading(
            path=self.path,
            storage=self._storage,
            place=self._place,
            moment=moment,
            strict=strict,
            only=only,
        )
        with claims.shared(here):
            try:
                if answer.from_memory:
                    loading.from_memory(state, here, elsewhere)
                else:
                    loading.from_files(state)
            except CheckpointDamaged as error:
                self._give_up(answer, error)

    def _give_up(self, answer: keeper.Restore, error: CheckpointDamaged) -> NoReturn:
        """Have all ranks started anew, for something else; where nobody can, say what there is."""
        if not self._session.node:  # no agent's, but the keeper process's, which starts nobody
            older = files.older(self._storage, answer.step + answer.from_memory)
            raise CheckpointDamaged(str(error), older=older) from error
        log.error("%s: all ranks go on from something else", error)
        damaged = keeper.Damaged(
            round=answer.round,
            step=answer.step,
            from_memory=answer.from_memory,
            what=str(error)[:MOST_WORDS],
        )
        with contextlib.suppress(CheckpointError):  # there is something better to say
            self._keeping.ask(damaged, ANSWER_TIMEOUT)
        raise error

    def distrust(self, after: int, why: str, ranks: Collection[int] = ()) -> bool:
        """Have nothing loaded again, from memory or storage, that the ranks of this round have saved after
        step `after`, since replicas do not hold the same any more (`elastic.replicas`). why: in words, for
        the job's events; ranks: those that may be wrong, whose nodes are probed with `--precheck`.

        Whoever sees the difference calls it, and ends then. False where nobody keeps it in mind: outside `elastic-run`.
        """
        after = arguments.whole("a step", after)
        if after < 0:
            raise CheckpointError(f"steps are counted from 1: no step is before {after}")
        if not self._session.node:
            return False
        doubted = keeper.Doubted(after=after, ranks=tuple(sorted(ranks)), what=why[:MOST_WORDS])
        try:
            self._keeping.ask(doubted, ANSWER_TIMEOUT)
        except CheckpointError as error:  # the difference is what there is to say
            log.error("%s: what is not to be trusted may be loaded again: %s", self.path, error)
            return False
        return True

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the snapshot that is under way, and give slots and keeper back; the snapshots stay.

        Raises `CheckpointError` for what went wrong with the last ones, and where their keeper is gone before
        what was to be on storage is.
        """
        try:
            self._saver.close()
            due, committed = self._saver.due, self._keeping.committed
            if self._keeping.open and due is not None and due > (committed or Moment(0, 0)):
                self._keeping.drain()  # raises where it is gone
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

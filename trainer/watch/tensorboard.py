"""TensorBoard's event files under Megatron's tags, without a point twice after a restart.

Points of steps that are run again are taken back by torch's `purge_step`, which takes back all points of
a folder from that step on, whatever their tag. So the twins `... vs samples`, whose steps are samples,
have a folder of their own, `samples`; TensorBoard shows it as another run.

What was not written yet is lost when a rank is killed: at most `FLUSH` seconds of points.
"""

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from elastic.proto.errors import UsageError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

FLUSH = 0.2
"""Seconds after which points are written at the latest, by threads that training does not wait for."""
SAMPLES = "samples"
"""Folder of the twins."""


class Board:
    """Writes one run's points; on one rank only. A folder that fails later, on a full disk, say, ends no
    training: there are no more points until the next start."""

    def __init__(
        self,
        folder: Path,
        *,
        iteration: int,
        consumed: int,
        queue_size: int = 1000,
        arguments: Mapping[str, Any],
    ) -> None:
        """iteration, consumed: where the run goes on; what earlier lives wrote beyond is taken back. arguments: the
        run's, each a text, as Megatron has them, at the first step of this life.

        Raises UsageError where tensorboard is not installed, or the folder cannot be written to.
        """
        self._folder, self._queue_size, self._failed = folder, queue_size, False
        self._arguments = {name: str(value) for name, value in arguments.items()}
        try:
            self._open(iteration, consumed)
        except OSError as error:
            raise UsageError(
                f"--tensorboard-dir {folder} cannot be written to: {error.strerror}"
            ) from error

    @property
    def writer(self) -> "SummaryWriter | None":
        """The one that a script's own code gets; None once the folder has failed."""
        return None if self._failed else self._steps

    def back(self, iteration: int, consumed: int) -> None:
        """Take back what was written beyond."""
        if self._failed:
            return
        self.close()
        with self._until_it_fails():
            self._open(iteration, consumed)

    def add(self, values: Mapping[str, float], iteration: int, consumed: int | None = None) -> None:
        """One point for each tag; with `consumed`, one for its twin."""
        if self._failed:
            return
        with self._until_it_fails():
            for tag, value in values.items():
                self._steps.add_scalar(tag, value, iteration)
                if consumed is not None:
                    self._samples.add_scalar(f"{tag} vs samples", value, consumed)

    def flush(self) -> None:
        """Write what waits."""
        if self._failed:
            return
        with self._until_it_fails():
            self._steps.flush()
            self._samples.flush()

    def close(self) -> None:
        """Write what waits, and end."""
        if self._failed:
            return
        with self._until_it_fails():
            self._steps.close()
            self._samples.close()

    def _open(self, iteration: int, consumed: int) -> None:
        self._steps = _writer(self._folder, iteration + 1, self._queue_size)
        self._samples = _writer(self._folder / SAMPLES, consumed + 1, self._queue_size)
        for name, value in self._arguments.items():  # at a step that is taken back with its points
            self._steps.add_text(name, value, iteration + 1)

    @contextmanager
    def _until_it_fails(self) -> Iterator[None]:
        """What a writer's thread met, which has ended, its next call raises."""
        try:
            yield
        except OSError as error:
            self._failed = True
            log.warning(
                "--tensorboard-dir %s: %s: no more points until the next start",
                self._folder, error.strerror,
            )  # fmt: skip


def _writer(folder: Path, purge_step: int, queue_size: int) -> "SummaryWriter":
    # Where tensorflow is installed, tensorboard would import it to write files: seconds, and GBs.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    try:
        from torch.utils.tensorboard import SummaryWriter

        _make_older(folder)
        return SummaryWriter(
            str(folder), purge_step=purge_step, max_queue=queue_size, flush_secs=FLUSH
        )
    except ImportError as error:
        raise UsageError(
            "--tensorboard-dir wants the package tensorboard: pip install elastic-runtime[train]"
        ) from error


def _make_older(folder: Path) -> None:
    """Files are read by name, which begins with the second that they are made in: one of an earlier life in
    this second might come after ours, and what we take back would be there again."""
    now = int(time.time())
    for file in folder.glob(f"events.out.tfevents.{now:010d}.*"):
        file.rename(file.with_name(file.name.replace(f".{now:010d}.", f".{now - 1:010d}.", 1)))

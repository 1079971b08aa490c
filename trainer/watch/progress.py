"""Megatron's progress.txt: how far each start and each checkpoint of a run came, `--log-progress`."""

import logging
from datetime import datetime
from pathlib import Path

from elastic.proto.errors import UsageError

FILE = "progress.txt"

log = logging.getLogger(__name__)


def started(now: datetime, *, job: str, devices: int) -> str:
    """The line of a start; job: as Slurm numbers it, may be empty."""
    return _line(now, job, devices, "Starting job")


def saved(
    now: datetime,
    *,
    job: str,
    devices: int,
    iteration: int,
    since_start: tuple[float, float],
    in_all: tuple[float, float],
    tokens: int,
) -> str:
    """The line of a checkpoint.

    since_start, in_all: floating-point operations, and seconds that they took, of this life of the run
    and of all; tokens: of all.
    """
    ours, whole = (
        operations / (seconds * devices * 1e12) for operations, seconds in (since_start, in_all)
    )
    return _line(
        now,
        job,
        devices,
        f"Saved checkpoint\tIteration: {iteration}\tJob throughput: {ours:.1f} TFLOP/s/GPU\t"
        f"Cumulative throughput: {whole:.1f} TFLOP/s/GPU\t"
        f"Floating-point operations: {in_all[0]:.2e}\tTokens (in billions): {tokens / 1e9:.2f}",
    )


def earlier(text: str) -> float:
    """Seconds of the lives of a run that a file tells of, each from its start to its last checkpoint."""
    seconds, began = 0.0, None
    life = 0.0
    for line in text.splitlines():
        try:
            at = datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
        except ValueError:
            continue
        if line.endswith("\tStarting job"):
            seconds, life, began = seconds + life, 0.0, at
        elif began is not None:
            life = (at - began).total_seconds()
    return seconds + life


class Progress:
    """The file of one life of a run; on one rank only."""

    def __init__(self, folder: Path, *, job: str, devices: int, flops: float, tokens: int) -> None:
        """folder: of the checkpoints; flops: of a token; tokens: that the run has had by now.

        Raises UsageError.
        """
        self._path, self._job, self._devices = folder / FILE, job, devices
        self._flops, self._first, self._began = flops, tokens, datetime.now()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._earlier = earlier(self._path.read_text()) if self._path.exists() else 0.0
            self._append(started(self._began, job=job, devices=devices))
        except OSError as error:
            raise UsageError(
                f"--log-progress: {self._path} cannot be written: {error.strerror}"
            ) from error

    def saved(self, iteration: int, tokens: int) -> None:
        """A checkpoint is on its way to storage; tokens: that the run has had by then."""
        now = datetime.now()
        seconds = max((now - self._began).total_seconds(), 1e-3)
        line = saved(
            now, job=self._job, devices=self._devices, iteration=iteration, tokens=tokens,
            since_start=((tokens - self._first) * self._flops, seconds),
            in_all=(tokens * self._flops, self._earlier + seconds),
        )  # fmt: skip
        try:
            self._append(line)
        except OSError as error:  # a full disk, say, which ends no training
            log.warning("%s: a line is lost: %s", self._path, error.strerror)

    def _append(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line)


def _line(now: datetime, job: str, devices: int, text: str) -> str:
    return f"{now:%Y-%m-%d %H:%M:%S}\tJob ID: {job}\t# GPUs: {devices}\t{text}\n"

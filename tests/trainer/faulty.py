"""`pretrain_gpt`, with ranks that are killed in the middle of what FAULTS says; by `node`, in the middle of
backward, the rank's whole node, and by `pause`, in the middle of forward, it is only stopped.

FAULTS: `PHASE@STEP:RANK`, one behind the other; each strikes once, the next one after it. STEP: finished
optimizer steps of the run at the earliest. FAULTS_FOLDER: where what has struck is noted, with the rank's pid.

The functions of a phase are wrapped: a timer that begins with one sends the signal somewhere in it.
"""

import functools
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from elastic.checkpoint.checkpointer import Checkpointer
from elastic.trainer import pretrain_gpt
from elastic.trainer.parallel.program import Program
from elastic.trainer.pretrain import pretrain
from elastic.trainer.run.feed import Feed
from elastic.trainer.run.loop import Loop

PHASES: dict[str, tuple[object, str]] = {
    "forward": (Program, "forward"),
    "backward": (torch.autograd, "_engine_run_backward"),
    "optimizer": (torch.optim.Adam, "step"),
    "save": (Checkpointer, "save"),
    "restore": (Checkpointer, "load"),
    "evaluate": (Loop, "evaluate"),
    "node": (torch.autograd, "_engine_run_backward"),
    "pause": (Program, "forward"),
}
"""Whose attribute runs then."""
FIRST = 0.005
"""Seconds within which the first run of a phase in a process is struck; later ones, somewhere in as many
as the last one took."""


class Fault(NamedTuple):
    phase: str
    step: int
    rank: int

    @classmethod
    def of(cls, text: str) -> "Fault":
        phase, _, where = text.partition("@")
        step, _, rank = where.partition(":")
        return cls(phase, int(step), int(rank))


class Faults:
    """Those that have not struck yet."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["FAULTS_FOLDER"])
        self._texts = os.environ["FAULTS"].split()
        self._rank = int(os.environ["RANK"])
        self._lock = threading.Lock()
        self._random = random.Random()  # not the one that training seeds
        self._took: dict[str, float] = {}
        self.step = 0
        """Optimizer steps that are finished."""

    def next(self, phase: str) -> tuple[Path, Fault] | None:
        """The next one and where it is noted, if this rank is to be struck by it in `phase` now."""
        for number, text in enumerate(self._texts):
            note = self._folder / f"{number}-{text}"
            if note.exists():
                continue
            fault = Fault.of(text)
            mine = fault.rank == self._rank and fault.phase == phase
            return (note, fault) if mine and self.step >= fault.step else None
        return None

    def wrap(self, phase: str) -> None:
        owner, name = PHASES[phase]
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def exposed(*args: Any, **kwargs: Any) -> Any:
            return self._expose(phase, lambda: inner(*args, **kwargs))

        setattr(owner, name, exposed)

    def _expose(self, phase: str, run: Callable[[], Any]) -> Any:
        began, timer = time.monotonic(), None
        if self.next(phase) is not None:
            within = self._random.uniform(0, self._took.get(phase, FIRST))
            timer = threading.Timer(within, self._strike, (phase,))
            timer.start()
        done = run()
        self._took[phase] = time.monotonic() - began
        if timer is not None:  # at its end at the latest
            timer.cancel()
            self._strike(phase)
        return done

    def _strike(self, phase: str) -> None:
        with self._lock:
            if (found := self.next(phase)) is not None:
                note, fault = found
                note.write_text(f"{os.getpid()}")
                strike(fault.phase)


def strike(phase: str) -> None:
    rank = psutil.Process()
    if phase == "pause":
        rank.suspend()
        return
    if phase == "node":
        agent, guardian = rank.parents()[:2]
        guardian.kill()
        agent.kill()
    rank.kill()


def count_steps(faults: Faults) -> None:
    """So that `faults` knows them."""
    inner = Loop._step

    @functools.wraps(inner)
    def counted(loop: Loop, feed: Feed, step: int) -> None:
        faults.step = step
        inner(loop, feed, step)
        faults.step = step + 1

    setattr(Loop, "_step", counted)  # noqa: B010 - the type of what wraps differs


if __name__ == "__main__":
    faults = Faults()
    count_steps(faults)
    for phase in PHASES:
        faults.wrap(phase)
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        None,
        pretrain_gpt.forward_step,
    )

"""`pretrain_gpt`, with ranks that are killed in the middle of what FAULTS says; by `node`, in the middle of
backward, the rank's whole node, and by `pause`, in the middle of forward, it is only stopped.

FAULTS: `PHASE@STEP:RANK`, one behind the other; each strikes once, the next one after it. STEP: finished
optimizer steps of the run at the earliest. FAULTS_FOLDER: where what has struck is noted, with the rank's pid.

CONSUMED: a file, if it is given, to which each rank appends a line of each step that it has finished: which samples
it has trained on in it.

The functions of a phase are wrapped: a timer that begins with one sends the signal somewhere in it.
"""

import functools
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
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
from elastic.trainer.run.step import Share

PHASES: dict[str, tuple[object, str]] = {
    "forward": (Program, "forward"),
    "backward": (torch.autograd, "_engine_run_backward"),
    "optimizer": (torch.optim.Adam, "step"),
    "save": (Checkpointer, "save"),
    "restore": (Checkpointer, "load"),
    "evaluate": (Loop, "evaluate"),
    "end": (Checkpointer, "wait"),
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


def note_consumed(step: int, shares: Sequence[Share]) -> None:
    """What counts of them: samples that only fill up do not."""
    if "CONSUMED" not in os.environ:
        return
    samples = []
    for share in shares:
        rows = iter(share.batch["tokens"].cpu().numpy())
        for leaf in share.leaves:
            for place, row in zip(leaf.places.tolist(), rows, strict=False):
                if leaf.weight:
                    samples.append((place, hashlib.sha256(row.tobytes()).hexdigest()[:16]))
    line = {
        "step": step, "life": [int(os.environ[one]) for one in ("PART", "ELASTIC_ROUND")],
        "ranks": int(os.environ["WORLD_SIZE"]), "samples": samples,
    }  # fmt: skip
    with Path(os.environ["CONSUMED"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def count_steps(faults: Faults) -> None:
    """So that `faults` knows them."""
    inner = Loop._step

    shares: list[Share] = []
    draw = Feed.__next__

    def drawn(feed: Feed) -> Share:
        shares.append(draw(feed))
        return shares[-1]

    @functools.wraps(inner)
    def counted(loop: Loop, feed: Feed, step: int) -> None:
        faults.step = step
        shares.clear()
        inner(loop, feed, step)
        note_consumed(step, shares)
        faults.step = step + 1

    setattr(Feed, "__next__", drawn)  # noqa: B010

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

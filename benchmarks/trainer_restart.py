"""SIGKILL of a rank of the trainer to its next finished step: `python -m benchmarks.trainer_restart [NAME]`.

The model is one of `benchmarks.mfu`, in exact mode, compiled; it goes on from memory, with the caches that the first
start has filled and, on GPUs, the spare ranks that a job has after its first minute. Each kill's seconds are told by
what the ranks went through, the last of them in each part: until scripts began (the loss is found, the other ranks are
ended, new ones are forked), their imports, the process group, the model, the restore, and the first step, with the most
graphs that one of them traced in it.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.mfu import SHAPES, Shape, arguments

PARTS = ("begin", "import", "join", "lay out", "restore", "step")
STEPS_BEFORE = 3
"""That are in memory, before a rank is killed."""
SPARE = r"elastic-spare cuda:\d+: slots registered"
"""Title of one that is ready and has registered its rank's slots, as in a job's second minute and later."""
SPARES = 60.0
"""Seconds after a start in which they come, or never: a device may have no room for one."""
PATIENCE = 300.0
"""Seconds for a start."""


class Job:
    """The trainer under a launcher, and what its ranks noted."""

    def __init__(self, out: Path, shape: Shape, ranks: int, more: list[str]) -> None:
        self._notes, self.ranks = out / "notes.jsonl", ranks
        self._spares = torch.cuda.is_available() and "--spare-ranks=off" not in more
        mine = [word for word in more if word.startswith("--spare-ranks=")]
        command = [sys.executable, "-m", "elastic.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--max-restarts=1000", f"--log-dir={out / 'logs'}", "--redirects=3", *mine]
        command += ["-m", "benchmarks.scripts.started", *arguments(shape, ranks)]
        command += ["--train-iters=1000000", "--log-interval=100", f"--save={out / 'save'}"]
        command += [word for word in more if word not in mine]
        environ = os.environ | {"NOTES": str(self._notes)}
        self.launcher = subprocess.Popen(command, env=environ)

    def notes(self, since: float) -> list[dict[str, Any]]:
        if not self._notes.exists():
            return []
        whole = self._notes.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        return [line for line in lines if line["time"] > since]

    def until(self, done: Callable[[], bool]) -> None:
        """Raises SystemExit where it does not come to that."""
        end = time.monotonic() + PATIENCE
        while not done():
            if self.launcher.poll() is not None or time.monotonic() > end:
                raise SystemExit("the job does not go on")
            time.sleep(0.01)

    def trains(self, since: float) -> bool:
        """Whether each rank has some steps in memory since then."""
        lines = self.notes(since)
        done = [line["rank"] for line in lines if line["what"] == "save" and line["value"]]
        if any(done.count(rank) < STEPS_BEFORE for rank in range(self.ranks)):
            return False
        return not self._spares or self.spared() or time.time() > since + SPARES

    def spared(self) -> bool:
        """Whether each rank has its spare."""
        ready = 0
        for process in psutil.Process(self.launcher.pid).children(True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = process.cmdline()[:1]  # behind it are the zeros that the title did not need
                ready += bool(title) and re.fullmatch(SPARE, title[0]) is not None
        return ready == self.ranks

    def starts(self, since: float) -> list[dict[str, float]]:
        """When each rank that has begun and finished a step since then was where."""
        found: dict[int, dict[str, float]] = {}
        for line in self.notes(since):
            found.setdefault(line["pid"], {}).setdefault(line["what"], line["time"])
        return [one for one in found.values() if {"begin", "step"} <= one.keys()]


def kill(job: Job) -> dict[str, float]:
    """Seconds of each part of the way to the next step that all ranks have finished, until the last was through it."""
    pids = {line["rank"]: line["pid"] for line in job.notes(0)}
    began = time.time()
    os.kill(pids[random.randrange(job.ranks)], signal.SIGKILL)
    job.until(lambda: len(job.starts(began)) == job.ranks)
    restored = {line["value"] for line in job.notes(began) if line["what"] == "restore"}
    if len(restored) != 1 or restored == {0}:
        raise SystemExit(f"what was restored: {restored}")
    starts = job.starts(began)
    marks = [began, *(max(start[part] for start in starts) for part in PARTS)]
    graphs = max(line["value"] for line in job.notes(began) if line["what"] == "step")
    found = {part: end - at for part, at, end in zip(PARTS, marks, marks[1:], strict=False)}
    return {"all": marks[-1] - began} | found | {"graphs": graphs}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer_restart", description=__doc__
    )
    parser.add_argument("name", nargs="?", default="1.3b", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also as JSON lines")
    args, more = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), SHAPES[args.name], args.ranks, more)
        try:
            began = time.time()
            job.until(lambda: job.trains(began))
            for _ in range(args.kills):
                print("with spares" if job.spared() else "without spares", end="  ")
                rows.append(kill(job))
                again = time.time()
                job.until(partial(job.trains, again))
                print(
                    "  ".join(f"{name} {found:.4g}" for name, found in rows[-1].items()), flush=True
                )
        finally:
            job.launcher.terminate()
            job.launcher.wait()
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print("median: " + "  ".join(f"{name} {found:.4g}" for name, found in middle.items()))
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps({"model": args.name, "ranks": args.ranks, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

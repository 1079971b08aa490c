"""SIGKILL of one rank to the next finished step of the new world, and to its first line."""

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample

STEPS_BEFORE = 3  # that every rank of a world has finished before a kill


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How often, how many ranks, on what."""

    kills: int = 20
    ranks: int = 2
    device: str = "cpu"
    hold_gib: float = 0.0
    settle: tuple[float, float] = (1.0, 4.0)  # seconds between a world's first steps and the kill
    start_s: float = 120.0
    bound_s: float = 60.0
    seed: int = 0


def measure(launcher: Launcher, setting: Setting) -> tuple[Sample, Sample]:
    """(to the next step of all ranks, to the first line of all ranks). A lost job is replaced."""
    rng = random.Random(setting.seed)
    steps, lines = Sample(launcher=launcher.name), Sample(launcher=launcher.name)
    while steps.tries < setting.kills:
        with Job() as job:
            job.launch(launcher, _args(setting))
            why = job.until(lambda: _running(job, setting, set()) is not None, setting.start_s)
            if why is not None:
                steps.fail(f"did not start: {why}")
                continue
            while steps.tries < setting.kills:
                before = job.pids()
                time.sleep(rng.uniform(*setting.settle))
                if not _kill_one(job, setting, rng, steps, lines, before):
                    break
    return steps, lines


def _args(setting: Setting) -> list[str]:
    return [
        "--standalone",
        f"--nproc_per_node={setting.ranks}",
        "--max_restarts=100",
        str(SCRIPTS / "steps.py"),
        f"--device={setting.device}",
        f"--hold-gib={setting.hold_gib}",
    ]


def _running(job: Job, setting: Setting, without: set[int]) -> dict[int, int] | None:
    """Rank -> pid of the newest world once each rank has finished a few steps, else None."""
    done = {e.rank: e.pid for e in job.events() if e.kind == "step" and e.step >= STEPS_BEFORE
            and e.pid not in without}  # fmt: skip
    return done if len(done) == setting.ranks else None


def _kill_one(
    job: Job,
    setting: Setting,
    rng: random.Random,
    steps: Sample,
    lines: Sample,
    before: set[int],
) -> bool:
    """Kill one rank and wait for the new world; whether the job lives on."""
    newest = {e.rank: e.pid for e in job.events() if e.kind == "step" and e.pid in before}
    victim = newest[rng.randrange(setting.ranks)]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    why = job.until(
        lambda: job.first_each_rank("step", before, killed) is not None, setting.bound_s
    )
    if why is not None:
        steps.fail(why)
        lines.fail(why)
        return False
    why = job.until(lambda: _running(job, setting, before) is not None, setting.bound_s)
    if why is not None:
        for sample in (steps, lines):
            sample.fail(f"stopped after its first step: {why}")
        return False
    new = job.first_each_rank("step", before, killed) or []
    steps.add(max(event.at for event in new) - killed)
    starts = job.first_each_rank("start", before, killed) or new
    lines.add(max(event.at for event in starts) - killed)
    rounds = len({e.pid for e in job.events() if e.kind == "start"} - before) / setting.ranks
    if rounds > 1:
        steps.notes.append(f"recovered, but in round {rounds:.1f} after the kill")
    return True


def rows(ours: Launcher | None, peers: Sequence[Launcher], setting: Setting) -> list[Row]:
    """Both measures for every launcher."""
    where = f"{setting.ranks} ranks, {setting.device}"
    where += f", {setting.hold_gib:g} GiB held" if setting.hold_gib else ""
    own = measure(ours, setting) if ours else (None, None)
    others = [measure(peer, setting) for peer in peers]
    return [
        Row(
            measure=f"SIGKILL of a rank to {what} ({where})",
            ours=own[number],
            peers=[other[number] for other in others],
        )
        for number, what in enumerate(("the next finished step", "all new ranks' first line"))
    ]

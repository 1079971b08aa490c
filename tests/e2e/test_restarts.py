"""Restarts in a row, at random moments of a round: its start, its training, the one before's end."""

import random
import time

import pytest

from tests.e2e.harness import Job, processes

MOST = 5.0
"""Seconds from a fault to the first step of every rank."""


def test_restarts_in_a_row(job: Job) -> None:
    restarts(job, 8, "auto")


@pytest.mark.soak
@pytest.mark.parametrize(("start", "times"), [("auto", 1000), ("spawn", 100)])
def test_a_thousand_restarts_in_a_row(job: Job, start: str, times: int) -> None:
    seconds = restarts(job, times, start)
    middle = sorted(seconds)[len(seconds) // 2]
    print(f"{len(seconds)} restarts by {start}: median {middle:.2f} s, most {max(seconds):.2f} s")
    print(*(f"{each:.2f}" for each in seconds))
    assert max(seconds) <= MOST


def test_ranks_are_forked_from_the_first_where_that_is_asked_for(job: Job) -> None:
    node = job.start("--rank-start", "fork", script=("--torch",))
    job.wait_for_steps(2)
    assert "round 1: 2 ranks started by standby" in node.said(), job.dump()
    job.finish()
    job.ends(0)


LATE = """
import os
os.environ["OMP_NUM_THREADS"] = "2"
import torch
layer = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def test_what_forking_from_the_first_does_not_do_is_said(job: Job) -> None:
    script = job.folder / "late.py"
    script.write_text(LATE)
    job.start("--rank-start", "fork", entry=(str(script),), log_level="WARNING")
    job.ends(0)
    assert "OMP_NUM_THREADS: set by the script, and too late" in job.nodes[0].said(), job.dump()
    job.start("--rank-start", "fork", "--no-python", entry=("true",), log_level="WARNING")
    job.nodes[1].exit_code()
    said = job.nodes[1].said()
    assert "--rank-start fork: ranks are spawned: a program is executed" in said, job.dump()


def restarts(job: Job, times: int, start: str) -> list[float]:
    """Seconds that each took. None may fail, leave a process, or find an old key in its store."""
    chance = random.Random(times)
    job.start("--fault-budget", "1000000", "--rank-start", start, script=("--torch",))
    number = job.wait_for_steps(2)
    seconds = []
    for _ in range(times):
        if chance.random() < 0.5:
            job.wait_for_more_steps(number, 2, count=chance.randrange(1, 5))
        seconds.append(_restart(job, number, chance))
        number = job.round()
    job.finish()
    job.ends(0)
    assert not any(line.fields["stale"] for line in job.told("store")), job.dump()
    steps = {line.fields["step"] for line in job.told("step", rank=0)}
    assert steps == set(range(1, max(steps) + 1)), "a step is missing"
    return seconds


def _restart(job: Job, number: int, chance: random.Random) -> float:
    """Kill a rank or both, half of the time once more while the next round starts."""
    victims = [job.rank(number, 0), job.rank(number, 1)]
    if chance.random() < 0.7:
        victims = [chance.choice(victims)]
    began = time.monotonic()
    processes.kill(*victims)
    while chance.random() < 0.5:
        job.wait_for("a rank of the next round", lambda: job.round() > number or None)  # noqa: B023 - called before it changes
        number = job.round()
        time.sleep(chance.random() * 0.3)
        if job.round() != number:
            continue
        began = time.monotonic()
        processes.kill(chance.choice([line.pid for line in job.told("start", round=number)]))
    last = job.wait_for_steps(2, after=number)
    first = [job.told("step", round=last, rank=rank)[0].at for rank in (0, 1)]
    for line in job.told("start"):
        same = processes.began(line.pid) < line.at  # of hundreds of ranks some have one number
        if line.round < last and same and processes.alive(line.pid):
            job.fail(f"rank {line.rank} of round {line.round} is still there")
    return max(first) - began

"""Ranks on GPUs, and the spares that are forked ahead for them: `pytest -m gpu`."""

import re

import pytest
import torch

from tests.e2e.harness import Job, processes
from tests.e2e.harness.processes import Process

pytestmark = pytest.mark.gpu


def spares(job: Job) -> list[Process]:
    """Those that are ready."""
    return [p for p in job.left() if re.fullmatch(r"elastic-spare cuda:\d+", p.command)]


def wait_for_spares(job: Job, count: int, without: frozenset[int] = frozenset()) -> list[Process]:
    def look() -> list[Process] | None:
        found = [spare for spare in spares(job) if spare.pid not in without]
        return found if len(found) == count else None

    return job.wait_for(f"{count} spare ranks", look)


def test_a_spare_rank_that_is_killed_is_made_again(job: Job) -> None:
    gpus = torch.cuda.device_count()
    node = job.start("--nproc-per-node", "gpu", script=("--torch", "--device", "cuda"))
    first = job.wait_for_steps(gpus)
    lost = wait_for_spares(job, gpus)[0]
    processes.kill(lost.pid)
    wait_for_spares(job, gpus, frozenset({lost.pid}))
    job.wait_for_more_steps(first, gpus)
    assert job.round() == first, job.dump()
    processes.kill(job.rank(first, gpus - 1))
    job.wait_for_steps(gpus, after=first)
    job.finish()
    job.ends(0)
    assert f"round 2: {gpus} ranks started by spare\n" in node.said(), job.dump()


def test_a_spare_rank_and_a_rank_die_together(job: Job) -> None:
    gpus = torch.cuda.device_count()
    job.start("--nproc-per-node", "gpu", script=("--torch", "--device", "cuda"))
    first = job.wait_for_steps(gpus)
    lost = wait_for_spares(job, gpus)[0]
    processes.kill(lost.pid)
    processes.kill(job.rank(first, 0))
    job.wait_for_steps(gpus, after=first)
    job.finish()
    job.ends(0)
    assert job.round() == 2, job.dump()

"""Ranks on GPUs, and the spares that are forked ahead for them: `pytest -m gpu`."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic.checkpoint import Checkpointer
from tests.e2e.harness import Job, processes
from tests.e2e.harness.processes import Process

pytestmark = pytest.mark.gpu


DEVICES = Path(__file__).parent / "harness" / "scripts" / "devices.py"


def spares(job: Job) -> list[Process]:
    """Those that are ready."""
    return [
        p
        for p in job.left()
        if re.fullmatch(r"elastic-spare cuda:\d+(: slots registered)?", p.command)
    ]


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


def test_tensors_that_go_to_a_device_after_a_save(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(1, {"model": model})
        assert checkpoint.snapshot == "sync"
        model.cuda()
        checkpoint.save(2, {"model": model}, persist=True)
        checkpoint.wait()
        assert checkpoint.snapshot in ("shadow", "stream")
    other = nn.Linear(64, 64).cuda()
    with Checkpointer(tmp_path) as checkpoint:
        assert checkpoint.load({"model": other}) == 2
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_a_device_without_room_has_no_shadow(tmp_path: Path) -> None:
    model = nn.Linear(16384, 16384, bias=False, device="cuda")
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (2 << 30), dtype=torch.uint8, device="cuda")
    with Checkpointer(tmp_path) as checkpoint:
        checkpoint.save(1, {"model": model}, persist=True)
        checkpoint.wait()
        assert checkpoint.snapshot == "stream"
    del taken
    torch.cuda.empty_cache()
    other = nn.Linear(16384, 16384, bias=False, device="cuda")
    with Checkpointer(tmp_path) as checkpoint:
        assert checkpoint.load({"model": other}) == 1
    assert torch.equal(other.weight, model.weight)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two devices")
def test_a_rank_has_no_context_on_anothers_device(job: Job) -> None:
    job.start("--nproc-per-node", "2", entry=(str(DEVICES), str(job.folder)))
    job.ends(0)
    for number in (1, 2):
        found = [line.fields for line in job.told("loaded", round=number)]
        steps = {(f["way"], f["step"], f["n"], f["all"]) for f in found}
        step = 0 if number == 1 else 2
        assert steps == {(way, step, 1, True) for way in ("shadow", "stream", "sync")}, job.dump()
    lines = [*job.told("loaded"), *job.told("closed")]
    assert {line.fields["first"] for line in lines if line.rank == 0} == {True}, job.dump()
    assert {line.fields["first"] for line in lines if line.rank == 1} == {False}, job.dump()

"""Planned ends of a round: every rank leaves in the save of one step, and none is computed twice."""

from pathlib import Path

import pytest

from tests.e2e.harness import Job, Node

SCRIPT = Path(__file__).parent / "harness" / "scripts" / "saves.py"


def start(job: Job, *flags: str, script: tuple[str, ...] = (), **more: object) -> Node:
    entry = (str(SCRIPT), str(job.folder), *script)
    return job.start("--last-call", "0.2", *flags, entry=entry, **more)  # type: ignore[arg-type]


def computed_once(job: Job, *worlds: int) -> None:
    """The rounds have had these worlds, and each step was computed in one of them, by all its ranks."""
    seen: list[int] = []
    for number, world in enumerate(worlds, 1):
        steps = [
            [line.fields["step"] for line in job.told("computed", round=number, rank=rank)]
            for rank in range(world)
        ]
        assert steps == [steps[0]] * world, job.dump()
        assert not job.told("computed", round=number, rank=world), job.dump()
        seen += steps[0]
    assert job.round() == len(worlds), job.dump()
    assert seen == list(range(1, len(seen) + 1)), job.dump()


@pytest.mark.parametrize("every", [1, 4])
def test_a_restart_by_hand(job: Job, every: int) -> None:
    start(job, script=("--save-every", str(every)))
    for number in range(1, 4):
        job.wait_for_steps(2, after=number - 1, count=5)
        job.ctl("restart")
    job.wait_for_steps(2, after=3, count=3)
    job.finish()
    job.ends(0)
    computed_once(job, 2, 2, 2, 2)


def test_a_node_joins_and_drains(job: Job) -> None:
    start(job, nodes="1:2", nproc=1)
    first = job.wait_for_steps(1, count=3)
    start(job, nodes="1:2", nproc=1)
    both = job.wait_for_steps(2, after=first, count=3)
    job.ctl("drain", "node1")
    job.wait_for_steps(1, after=both, count=3)
    job.finish()
    job.ends(0, 213)
    computed_once(job, 1, 2, 1)


def test_the_whole_job_drains_and_goes_on(job: Job) -> None:
    start(job)
    job.wait_for_steps(2, count=3)
    job.ctl("drain")
    job.ends(213)
    start(job)
    job.wait_for_steps(2, after=1, count=3)
    job.finish()
    assert job.nodes[1].exit_code() == 0, job.dump()
    computed_once(job, 2, 2)


def test_a_script_that_never_saves_is_signalled_when_the_time_is_over(job: Job) -> None:
    start(job, "--drain-timeout", "2", script=("--save-every", "1000000"))
    number = job.wait_for_steps(2, count=3)
    job.ctl("restart")
    job.wait_for_more_steps(number, 2)
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)
    assert job.told("loaded", round=number + 1)[0].fields["step"] == 0, job.dump()


def test_a_rank_that_dies_on_the_way_out_costs_what_it_always_costs(job: Job) -> None:
    start(job, script=("--step-time", "0.5", "--save-every", "1000000"))
    number = job.wait_for_steps(2)
    job.ctl("restart")
    os.kill(job.rank(number, 1), signal.SIGKILL)
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)
    assert job.round() == number + 1, job.dump()


def test_a_master_that_dies_meanwhile(job: Job) -> None:
    """Its next life gives an order of its own."""
    node = start(job, script=("--step-time", "0.3", "--save-every", "4"))
    job.wait_for_steps(2, count=2)
    job.ctl("restart")
    os.kill(node.master(), signal.SIGKILL)
    job.wait_for_steps(2, after=1, count=2)
    job.finish()
    job.ends(0)
    computed_once(job, 2, 2)

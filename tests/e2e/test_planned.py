"""Planned ends of a round: every rank leaves in the save of one step, and none is computed twice."""

from pathlib import Path

import pytest

from tests.e2e.harness import FORK, ROOT, Job, Node, processes

SCRIPTS = Path(__file__).parent / "harness" / "scripts"
SCRIPT = SCRIPTS / "saves.py"


def start(job: Job, *flags: str, script: tuple[str, ...] = (), **more: object) -> Node:
    entry = (str(SCRIPT), str(job.folder), *script)
    return job.start(FORK, "--last-call", "0.2", *flags, entry=entry, **more)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.soak), 4])
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
    assert "is lost" not in job.nodes[1].said(), "the other has what it had"
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


SELDOM = ("--save-every", "4", "--step-time", "0.2")


def test_ranks_without_memory_for_snapshots_leave_in_a_step_on_storage(job: Job) -> None:
    """That of a node that has memory goes there, too, though nothing is due."""
    poor = job.folder / "poor"
    poor.mkdir()
    (poor / "sitecustomize.py").write_text(
        "from elastic.agent.snapshots import memory; memory.available = lambda *_: 0"
    )
    for environ in ({}, {"PYTHONPATH": f"{ROOT}:{poor}"}):
        start(job, nodes="2", nproc=1, environ=environ, script=SELDOM)
    job.wait_for_steps(2, count=2)
    job.ctl("restart")
    job.wait_for_steps(2, after=1, count=2)
    job.finish()
    job.ends(0, 0)
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
    processes.kill(job.rank(number, 1))
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)
    assert job.round() == number + 1, job.dump()


def test_a_master_that_dies_meanwhile(job: Job) -> None:
    """Its next life gives an order of its own."""
    node = start(job, script=("--step-time", "0.3", "--save-every", "4"))
    job.wait_for_steps(2, count=2)
    job.ctl("restart")
    processes.kill(node.master())
    job.wait_for_steps(2, after=1, count=2)
    job.finish()
    job.ends(0)
    computed_once(job, 2, 2)


def test_back_to_an_older_checkpoint(job: Job) -> None:
    """Whatever is newer is void from then on, also for who comes after, and after a crash."""
    start(job, script=("--persist-every", "4"))
    number = job.wait_for_steps(2, count=14)
    digest = {x.fields["step"]: x.fields["digest"] for x in job.told("step", rank=0)}
    storage = job.folder / "checkpoint" / "step-00000004" / "manifest.json"
    job.wait_for("step 4 on storage", lambda: storage.exists() or None)
    assert "no step 3" in job.ctl_fails("restart", "--from", "3")
    assert job.round() == number, job.dump()
    job.ctl("restart", "--from", "4")
    for after in (number, number + 1):
        job.wait_for("a load", lambda: len(job.told("loaded", round=after + 1)) == 2 or None)  # noqa: B023 - called before it changes
        processes.kill(job.rank(after + 1, 0))  # nothing newer may be there yet
    last = job.wait_for_steps(2, after=number + 2, count=3)
    job.ctl("restart")
    job.wait_for_steps(2, after=last)
    job.finish()
    job.ends(0)
    first = job.told("loaded", round=number + 1)
    assert [(x.fields["step"], x.fields["digest"]) for x in first] == 2 * [(4, digest[4])], (
        job.dump()
    )
    most = {number: 4}
    for later in range(number + 1, job.round() + 1):
        loaded = {x.fields["step"] for x in job.told("loaded", round=later)}
        assert loaded <= set(range(4, most[later - 1] + 1)), job.dump()
        steps = [line.fields["step"] for line in job.told("computed", round=later, rank=0)]
        most[later] = max([4, *steps])
    for line in job.told("step"):
        step = line.fields["step"]
        assert digest.setdefault(step, line.fields["digest"]) == line.fields["digest"]


def test_a_checkpoint_that_is_only_begun_from(job: Job) -> None:
    """What an earlier round has saved there is loaded from memory; a planned end waits in no save of it, and
    going back asks for no step of it."""
    node = job.start(FORK, nproc=1, entry=(str(SCRIPTS / "begins.py"), str(job.folder)))
    job.wait_for_steps(1)
    job.kill(1, 0)
    job.wait_for("what it begins from", lambda: job.told("loaded", round=2) or None)
    job.ctl("restart")
    (job.folder / "go").touch()
    job.wait_for_steps(1, after=2, count=3)
    storage = job.folder / "checkpoint" / "step-00000005" / "manifest.json"
    job.wait_for("step 5 on storage", lambda: storage.exists() or None)
    assert "has no step 9999" in job.ctl_fails("restart", "--from", "9999")
    job.ctl("restart", "--from", "5")
    job.wait_for_steps(1, after=3)
    job.finish()
    job.ends(0)
    assert f"{job.folder}/other: round 2 goes on from step 3, in memory" in node.said(), job.dump()
    (begun,), (left,) = job.told("loaded", round=2), job.told("loaded", round=3)
    assert begun.fields["own"] == [3.0] * 3, job.dump()
    assert job.told("computed", round=2)[-1].fields["step"] == left.fields["step"], job.dump()
    assert job.told("loaded", round=4)[0].fields["step"] == 5, job.dump()

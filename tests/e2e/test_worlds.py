"""Legal worlds only: units of ranks, too few nodes, and failures that no restart mends."""

import signal
from pathlib import Path

from tests.e2e.harness import FORK, Job, processes

UNIT = """
import os, sys, time
from pathlib import Path
from elastic import session

folder = Path(sys.argv[1])
try:
    session.declare_rank_unit(2)
except Exception:
    time.sleep(600)  # the agent ends us, often before the answer came; this is not to be counted
(folder / f"world-{os.environ['RANK']}").write_text(os.environ["WORLD_SIZE"])
"""


def test_a_rank_unit_leaves_slots_idle(job: Job) -> None:
    for _ in range(2):
        job.start("--rank-unit", "4", nodes="2", nproc=3)
    number = job.wait_for_steps(4)
    job.finish()
    job.ends(0)
    assert {line.fields["world"] for line in job.told("start", round=number)} == {4}
    assert len(job.told("start", round=number)) == 4


def test_a_node_unit_leaves_a_node_waiting_for_a_place(job: Job) -> None:
    """The third would make no whole unit; it takes the place of one that dies."""
    flags = ("--node-unit", "2", "--last-call", "0.1")
    job.start(*flags, nodes="2:4", nproc=1).master()
    second = job.start(*flags, nodes="2:4", nproc=1)
    number = job.wait_for_steps(2)
    job.start(*flags, nodes="2:4", nproc=1)
    job.wait_for_event("node2 attached")
    job.wait_for_more_steps(number, 2, count=100)
    assert job.round() == number, job.dump()
    processes.kill(second.guardian, second.agent())
    after = job.wait_for_steps(2, after=number)
    assert job.told("start", round=after)[0].fields["world"] == 2, job.dump()
    job.finish()
    job.ends(0, -signal.SIGKILL, 0)


def test_the_count_of_restarts_is_equal_on_every_node(job: Job) -> None:
    """Ranks may use it to agree on something; torchrun's nodes count each for themselves."""
    for _ in range(2):
        fault = ("--fault", "step:exit3:1:1")
        job.start("--max-restarts", "1", nodes="2", nproc=2, script=fault)
    number = job.wait_for_steps(4, after=1)
    job.finish()
    job.ends(0)
    counts = {line.rank: line.fields["restarts"] for line in job.told("start", round=number)}
    assert counts == dict.fromkeys(range(4), "1"), job.dump()


def test_a_script_declares_its_unit_and_gets_a_world_that_fits(job: Job) -> None:
    script = job.folder / "unit.py"
    script.write_text(UNIT)
    job.start(FORK, nproc=3, entry=(str(script), str(job.folder)))
    job.ends(0)
    worlds = {path.name: path.read_text() for path in job.folder.glob("world-*")}
    assert worlds == {"world-0": "2", "world-1": "2"}, job.dump()
    assert job.report()["restarts_by_cause"] == {"rank unit": 1}


def test_fewer_than_min_wait_without_ranks_and_go_on_when_a_node_comes(job: Job) -> None:
    first = job.start(nodes="2", nproc=1)
    first.master()  # so that it is the first that hosts it
    second = job.start(nodes="2", nproc=1)
    number = job.wait_for_steps(2)
    processes.kill(second.guardian, second.agent())
    job.wait_for(
        "the wait", lambda: any("1 of at least 2 nodes" in e for e in job.events()[3:]) or None
    )
    job.wait_for("no rank left", lambda: not _ranks(job, first.agent()) or None)
    job.start(nodes="2", nproc=1)
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0, -signal.SIGKILL, 0)


def _ranks(job: Job, agent: int) -> list[processes.Process]:
    return [p for p in processes.children(agent) if "rank.py" in p.command]


def test_fewer_than_min_for_too_long_ends_the_job_with_the_reason(job: Job) -> None:
    job.start("--below-min-timeout", "1", nodes="2", nproc=1).master()
    second = job.start("--below-min-timeout", "1", nodes="2", nproc=1)
    job.wait_for_steps(2)
    processes.kill(second.guardian, second.agent())
    job.ends(1, -signal.SIGKILL)
    reason = job.report()["result"]["reason"]
    assert "1 of at least 2 nodes here" in reason
    assert "for 1 s" in reason


def test_a_failure_that_no_restart_mends_is_stopped_at_the_third(job: Job) -> None:
    job.start("--max-restarts", "9", nproc=1, script=("--fault", "start:exit3:0:*"))
    job.ends(1)
    assert len(job.told("fault")) == 3, job.dump()
    assert "3 times with no new step" in job.report()["result"]["reason"]
    attempts = sorted(path.name for path in Path(job.folder / "logs" / "job").glob("attempt_*"))
    assert attempts == ["attempt_0", "attempt_1", "attempt_2"]


def test_a_fault_budget_that_is_used_up_ends_the_job_with_the_reason(job: Job) -> None:
    """One kill is paid for; the next comes before a step gave anything back."""
    script = ("--fault", "start:kill:0:*")
    node = job.start("--fault-budget", "1", nproc=1, script=script, log_level="WARNING")
    job.ends(1)
    assert len(job.told("fault")) == 2, job.dump()
    reason = job.report()["result"]["reason"]
    assert "ended by SIGKILL" in reason, job.dump()
    assert "with too little progress in between" in reason, job.dump()
    assert [line for line in node.said().splitlines() if "too little" in line] == [
        f"elastic-run: {reason}"
    ], job.dump()

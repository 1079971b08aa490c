"""What goes wrong in a job is told to a command, once, whatever becomes of the master."""

import json
import shlex
import sys
from typing import Any

from tests.e2e.harness import Job, processes
from tests.e2e.test_hangs import start as start_to_hang

HANGS = ("--notify", shlex.join((sys.executable, "-c", "import signal; signal.pause()")))


def told(job: Job) -> list[dict[str, Any]]:
    path = job.folder / "notices"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def to_a_file(job: Job) -> tuple[str, ...]:
    return ("--notify", f"cat >> {shlex.quote(str(job.folder / 'notices'))}")


def first(job: Job, kind: str) -> dict[str, Any]:
    return job.wait_for(
        f"a notice of {kind}", lambda: next((one for one in told(job) if one["kind"] == kind), None)
    )


def test_a_rank_that_fails_and_a_master_that_dies(job: Job) -> None:
    """Its next life tells only what is new: the end. Of a command that hung then nothing is left."""
    flags = ("--max-restarts", "1", *HANGS, *to_a_file(job))
    node = job.start(*flags, script=("--fault", "step:raise:1:1"))
    failure = first(job, "failure")
    assert (failure["run_id"], failure["nodes"], failure["ranks"]) == ("job", ["node0"], [1])
    assert "ValueError: asked to fail at step" in failure["reason"]
    assert (failure["detail"]["label"], failure["detail"]["round"]) == ("script_error", 1)
    job.wait_for_steps(2, after=1)
    processes.kill(node.master())
    job.wait_for_event("master is back in epoch 2")
    job.finish()
    job.ends(0)
    assert [one["kind"] for one in told(job)] == ["failure", "job_succeeded"], told(job)


def test_a_hang_is_told_and_who_does_not_listen_holds_up_nobody(job: Job) -> None:
    start_to_hang(job, "stop:3", flags=(*HANGS, *to_a_file(job)))
    hang = first(job, "hang")
    assert hang["ranks"] == [3], hang
    assert hang["nodes"][0] in hang["reason"]
    job.wait_for_steps(4, after=1, count=5)
    job.finish()
    job.ends(0)
    assert [one["kind"] for one in told(job)] == ["hang", "job_succeeded"], told(job)
    said = "".join(node.said() for node in job.nodes)
    assert f"--notify {sys.executable}: hang is not told: " in said

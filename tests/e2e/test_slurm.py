"""`srun elastic-run`: two tasks of one step, with the variables that Slurm gives them."""

import secrets
import signal
import sys
from pathlib import Path

import pytest

from elastic.slurm import step
from tests.e2e.harness import SCRIPT, Job, Node, processes

DRAINED = 213


def _start(job: Job, number: int, node: int, *, nodes: int = 2, again: bool = False) -> Node:
    """One task of the step, as srun starts it."""
    environ = {
        "SLURM_JOB_ID": str(number),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(node),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NODELIST": "localhost",
        "PATH": f"{job.folder / 'bin'}:/usr/bin:/bin",
    }
    if again:
        environ["SLURM_RESTART_COUNT"] = "1"
    assert step(environ) is not None
    flags = ("--nproc-per-node", "1", "--state-dir", str(job.folder / "logs"))
    command = (sys.executable, "-m", "elastic.run", *flags, str(SCRIPT), str(job.folder))
    return job.launch(f"task{node}{'-again' if again else ''}", command, environ)


def _scontrol(job: Job) -> Path:
    """A scontrol that notes what it was asked."""
    asked = job.folder / "scontrol.asked"
    program = job.folder / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    return asked


def test_a_warning_drains_the_job_requeues_it_and_it_goes_on(job: Job) -> None:
    number = 100_000 + secrets.randbelow(1_000_000)
    asked = _scontrol(job)
    for node in (0, 1):
        _start(job, number, node)
    first = job.wait_for_steps(2)
    for launcher in job.nodes:
        launcher.signal(signal.SIGUSR1)  # Slurm warns every task of the step
    assert [launcher.exit_code() for launcher in job.nodes] == [DRAINED, DRAINED], job.dump()
    assert asked.read_text() == f"requeue {number}\n", job.dump()  # once, by the first node
    for node in (0, 1):
        _start(job, number, node, again=True)
    job.wait_for_steps(2, after=first)
    job.finish()
    job.ends(DRAINED, DRAINED, 0, 0)


@pytest.mark.parametrize("when", ["with it", "soon", "started again"])
def test_a_warning_reaches_an_agent_that_starts_again(job: Job, when: str) -> None:
    """Slurm warns once: heard with the agent's death, or soon after it, or while the next imports."""
    asked = _scontrol(job)
    node = _start(job, 4711, 0, nodes=1)
    job.wait_for_steps(1)
    if when == "with it":
        node.signal(signal.SIGSTOP)
    processes.kill(node.agent())
    if when == "started again":
        job.wait_for("the next agent", lambda: "is started again" in node.said() or None)
    node.signal(signal.SIGUSR1)
    node.signal(signal.SIGCONT)
    job.ends(DRAINED)
    assert node.said().count("the agent died") == 1, job.dump()
    assert asked.read_text() == "requeue 4711\n"

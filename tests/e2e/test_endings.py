"""Why launchers end: their exit codes, and the termination log of a container. Real processes."""

import signal
import sys
from pathlib import Path

import pytest

from elastic.proto import env
from elastic.proto.ending import Ended, Ending, from_json
from tests.e2e.harness import FORK, Job
from tests.e2e.harness.job import SCRIPT

HANGS = SCRIPT.with_name("hangs.py")


def termination_log(job: Job, name: str) -> tuple[str, str]:
    path = job.folder / f"{name}.termination"
    path.touch()
    return "--termination-log", str(path)


def said(job: Job, name: str) -> Ending:
    found = from_json((job.folder / f"{name}.termination").read_text())
    assert found is not None, job.dump()
    return found


def test_an_error_of_the_script(job: Job) -> None:
    log = termination_log(job, "a")
    job.start("--exit-codes", "detailed", *log, script=("--fault", "step:raise:1:1"))
    job.ends(1)
    told = said(job, "a")
    assert (told.kind, told.rank, told.step) == (Ended.USER_ERROR, 1, 0)
    assert told.exception
    assert told.fingerprint.startswith("script error|1|")
    result = job.report()["result"]
    assert (result["class"], result["fingerprint"]) == (told.kind, told.fingerprint)


JOIN = ("--join-timeout", "4")
"""Its own master has to be there by then, on a machine that is busy, too."""


def test_nobody_came(job: Job) -> None:
    log = termination_log(job, "a")
    job.start("--exit-codes", "detailed", *JOIN, *log, nodes="2")
    job.ends(214)
    assert said(job, "a").kind is Ended.RENDEZVOUS_TIMEOUT


def test_torchruns_code_stays_without_the_flag(job: Job) -> None:
    log = termination_log(job, "a")
    job.start(*JOIN, *log, nodes="2")
    job.ends(1)
    assert said(job, "a").kind is Ended.RENDEZVOUS_TIMEOUT


def test_no_master(job: Job) -> None:
    flags = ("--join-timeout", "0.5", "--rdzv-conf", "is_host=false", "--exit-codes", "detailed")
    job.start(*flags, *termination_log(job, "a"), nodes="2")
    job.ends(210)
    assert said(job, "a").kind is Ended.MASTER_LOST


def test_too_few_are_left(job: Job) -> None:
    flags = ("--below-min-timeout", "4", "--exit-codes", "detailed")
    job.start(*flags, *termination_log(job, "a"), nodes="2", nproc=1).master()
    second = job.start(*flags, nodes="2", nproc=1)  # and so not the one with the master
    job.wait_for_steps(2)
    second.signal(signal.SIGTERM)
    assert second.exit_code() == 1, job.dump()
    job.ends(216, 1)
    assert said(job, "a").kind is Ended.BELOW_MIN


@pytest.mark.parametrize("one", [("--fault-budget", "0"), ("--hang-action", "fail")])
def test_a_hang_that_ends_the_job(job: Job, one: tuple[str, str]) -> None:
    flags = (FORK, *one, "--exit-codes", "detailed", *termination_log(job, "a"))
    entry = (str(HANGS), str(job.folder), "40", "0.02", "cpu", "stop:1")
    job.start(*flags, entry=entry)
    job.ends(215)
    assert said(job, "a").kind is Ended.HANG


def test_a_mistake_on_the_command_line(job: Job) -> None:
    job.start("--require-token", *termination_log(job, "a"))
    job.ends(2)
    assert said(job, "a").kind is Ended.USAGE


def test_in_a_pod_of_an_elasticjob(job: Job, tmp_path: Path) -> None:
    """It joins whoever the Service's name leads to, whatever its command line says of nodes; SIGTERM
    drains it, though it was to be passed on."""
    job.start("--last-call", "0.2", nodes="1:2", nproc=1)
    first = job.wait_for_steps(1)
    pod = {
        env.POD_JOB: "job",
        env.POD_NAME: "job-worker-1-r0",
        env.POD_MASTER: f"{job.address}:{job.port}",
        env.POD_NODES: "1:2",
    }
    flags = ("--nnodes", "7", "--standalone", "--signals-to-handle", "SIGTERM,SIGINT")
    log = termination_log(job, "b")
    second = job.start(*flags, *log, nodes="7", nproc=1, environ=pod)
    grown = job.wait_for_steps(2, after=first)
    assert "job-worker-1-r0 attached" in "".join(job.events())
    line = "in a pod of ElasticJob job its spec's range, 1:2 nodes, decides; --standalone does not"
    assert line in second.said()
    second.signal(signal.SIGTERM)
    assert second.exit_code() == 213, job.dump()
    assert said(job, "b").kind is Ended.DRAINED
    job.wait_for_steps(1, after=grown)
    job.finish()
    job.ends(0, 213)


def test_a_command_pasted_from_a_cloud_platform(job: Job) -> None:
    """Its variables are the pod's own by now; where the master is, and how many nodes, the ElasticJob says."""
    job.start("--last-call", "0.2", nodes="1:2", nproc=1)
    first = job.wait_for_steps(1)
    pod = {
        env.POD_JOB: "job", env.POD_NAME: "job-worker-1-r0", env.POD_MASTER: f"{job.address}:{job.port}",
        env.POD_NODES: "1:2", "WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "job-master", "MASTER_PORT": "29400",
    }  # fmt: skip
    pasted = (
        "exec $PYTHON -m elastic.run --nproc_per_node 1 --nnodes $WORLD_SIZE --node_rank $RANK "
        "--master_addr $MASTER_ADDR --master_port $MASTER_PORT --precheck off "
        f"--log-dir {job.folder}/logs {SCRIPT} {job.folder}"
    )
    command = ("sh", "-c", pasted)
    second = job.launch("pasted", command, {**pod, "PYTHON": sys.executable})
    grown = job.wait_for_steps(2, after=first)
    assert "job-worker-1-r0 attached" in "".join(job.events())
    line = "in a pod of ElasticJob job its spec's range, 1:2 nodes, decides; --nnodes 2 does not"
    assert line in second.said()
    second.signal(signal.SIGTERM)
    assert second.exit_code() == 213, job.dump()
    job.wait_for_steps(1, after=grown)
    job.finish()
    job.ends(0, 213)

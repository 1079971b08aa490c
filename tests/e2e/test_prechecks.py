"""Nodes that are probed before they join, with faults in the probes of one."""

import re
import sys
from pathlib import Path

import pytest

from elastic.proto.ending import Ended
from tests.agent.probes import healthy
from tests.e2e.harness import FORK, ROOT, Job, processes
from tests.e2e.harness.stuck import stuck_folder
from tests.e2e.test_endings import said, termination_log
from tests.e2e.test_hangs import SCRIPT, STEP
from tests.e2e.test_notify import first, to_a_file


def corrupt(folder: Path) -> str:
    """A PYTHONPATH of probes whose products are wrong."""
    return healthy.environ(folder, torch_fault=healthy.CORRUPTS)["PYTHONPATH"]


def shown(job: Job, node: int, line: str) -> None:
    """Wait for it on a launcher's console, which comes after the event."""
    job.wait_for(f"{line!r} on a console", lambda: line in job.nodes[node].said())


def test_nodes_that_work_train(job: Job) -> None:
    for _ in range(2):
        job.start("--precheck", "quick", nodes="2")
    number = job.wait_for_steps(4)
    assert number == 1, job.dump()
    events = "\n".join(job.events())
    assert events.count("is ok, probed in") == 2, events
    assert re.search(r"2 nodes were tested two by two, [\d.]+ s; round 1", events), events
    job.finish()
    job.ends(0)


def test_a_node_that_computes_wrong_is_kept_out_and_the_others_train(job: Job) -> None:
    job.start("--precheck", "quick", *to_a_file(job), nodes="1:2").master()
    path = f"{corrupt(job.folder / 'site')}:{ROOT}"
    job.start("--precheck", "quick", nodes="1:2", environ={"PYTHONPATH": path})
    job.wait_for_event("node1 is kept out: matmul: cpu: ")
    shown(job, 0, "elastic-run: node1 is kept out: matmul: cpu: ")
    shown(job, 1, "elastic-run: this node is faulty: matmul: cpu: ")
    told = first(job, "kept_out")
    assert (told["nodes"], told["detail"]) == (["node1"], {"level": "quick"})
    assert told["reason"].startswith("node1 is kept out: matmul: cpu: "), told
    job.wait_for_steps(2)
    assert re.search(r"^node1 +kept out ", job.ctl("status"), re.MULTILINE), job.ctl("status")
    job.finish()
    job.ends(0)


def test_a_node_whose_rank_hung_in_the_kernel_is_probed_again_and_replaced(job: Job) -> None:
    """A disk never answers, and the node's probe finds a fault that came while it trained."""
    sites = [job.folder / f"site{number}" for number in range(3)]
    entry = (str(SCRIPT), str(job.folder), str(STEP), "0.02", "cpu", "read:3")
    with stuck_folder(job.folder / "stuck"):
        for site in sites:
            site.mkdir()
            path = {"PYTHONPATH": f"{site}:{ROOT}"}
            job.start(FORK, "--precheck", "quick", nodes="2", entry=entry, environ=path)
        victim = job.rank(1, 3)
        (at,) = (
            number
            for number, node in enumerate(job.nodes)
            if victim in {process.pid for process in processes.descendants(node.process.pid)}
        )
        corrupt(sites[at])
        job.wait_for_event(f"rank 3 on node{at} does not go on")
        job.wait_for_event(f"node{at} is kept out: matmul: cpu: ")
        job.wait_for_steps(4, after=1, count=5)
    job.finish()
    job.ends(0)


def test_a_node_that_is_only_probed_and_is_faulty(job: Job) -> None:
    path = f"{corrupt(job.folder / 'site')}:{ROOT}"
    flags = ("--probe-only", "--precheck", "quick", "--exit-codes", "detailed")
    job.start(*flags, *termination_log(job, "a"), environ={"PYTHONPATH": path})
    job.ends(211)
    assert said(job, "a").kind is Ended.UNHEALTHY


@pytest.mark.soak
def test_probes_use_the_python_of_the_ranks(job: Job) -> None:
    """Ours may have no torch."""
    python = job.folder / "python"
    python.write_text(f'#!/bin/sh\nRANKS=1 exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    fault = """
import os
if (in_probe("device") or in_probe("pair")) and "RANKS" not in os.environ:
    sys.exit("there is no torch")
"""
    path = f"{healthy.environ(job.folder / 'site', fault)['PYTHONPATH']}:{ROOT}"
    environ = {"PYTHON_EXEC": str(python), "PYTHONPATH": path}
    for _ in range(2):
        job.start("--precheck", "quick", nodes="2", environ=environ)
    job.wait_for_steps(2)
    events = "\n".join(job.events())
    assert events.count("is ok, probed in") == 2, events
    assert "2 nodes were tested two by two" in events
    job.finish()
    job.ends(0)


@pytest.mark.soak
def test_one_that_has_not_the_interface_is_named_though_it_came_first(job: Job) -> None:
    """Of two that do not work together the one that came later is kept out; here it is no link."""
    job.start("--precheck", "quick", nodes="1:2", environ={"GLOO_SOCKET_IFNAME": "nosuch0"})
    job.wait_for_event("node0 attached")
    job.start("--precheck", "quick", nodes="1:2")
    told = "node0 is kept out: node node0: opening the network: "
    job.wait_for_event(told)
    shown(job, 0, told)
    job.wait_for_steps(2)
    status = job.ctl("status")
    assert re.findall(r"^(node\d) +kept out ", status, re.MULTILINE) == ["node0"], status
    job.finish()
    job.ends(0)

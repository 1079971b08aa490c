"""Nodes that are probed before they join, with faults in the probes of one."""

import re
from pathlib import Path

from tests.agent.probes import healthy
from tests.e2e.harness import ROOT, Job
from tests.e2e.test_notify import first, to_a_file

CORRUPTS = """
mm = torch.mm
def corrupting(*args, **kwargs):
    product = mm(*args, **kwargs)
    product.view(torch.int32)[0, 0] ^= 1 << 3
    return product
torch.mm = corrupting
"""


def corrupt(folder: Path) -> str:
    """A PYTHONPATH of probes whose products are wrong."""
    return healthy.environ(folder, torch_fault=CORRUPTS)["PYTHONPATH"]


def test_nodes_that_work_train(job: Job) -> None:
    for _ in range(2):
        job.start("--precheck", "quick", nodes="2")
    number = job.wait_for_steps(4)
    assert number == 1, job.dump()
    said = [event for event in job.events() if "is ok, probed in" in event]
    assert len(said) == 2, job.events()
    job.finish()
    job.ends(0)


def test_a_node_that_computes_wrong_is_kept_out_and_the_others_train(job: Job) -> None:
    job.start("--precheck", "quick", *to_a_file(job), nodes="1:2")
    path = f"{corrupt(job.folder / 'site')}:{ROOT}"
    job.start("--precheck", "quick", nodes="1:2", environ={"PYTHONPATH": path})
    job.wait_for_event("node1 is kept out: matmul: cpu: ")
    told = first(job, "kept_out")
    assert (told["nodes"], told["detail"]) == (["node1"], {"level": "quick"})
    assert told["reason"].startswith("node1 is kept out: matmul: cpu: "), told
    job.wait_for_steps(2)
    assert re.search(r"^node1 +kept out ", job.ctl("status"), re.MULTILINE), job.ctl("status")
    job.finish()
    job.ends(0)

"""A launcher and a master of releases that do not fit: one line says so, and no job is disturbed."""

from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc
from elastic.proto.version import WIRE, Version
from tests.e2e.harness import ROOT, Job

FAR = [Version(WIRE.major - 1, 0), Version(WIRE.major + 1, 0), Version(WIRE.major, WIRE.minor + 2)]

RELEASE = """
from elastic.proto import version

version.WIRE = version.Version({0.major}, {0.minor})
"""


def of_release(job: Job, named: Version) -> dict[str, str]:
    """The environment of a launcher all of whose processes speak that version."""
    site = job.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RELEASE.format(named))
    return {"PYTHONPATH": f"{site}:{ROOT}"}


def misfit(theirs: Version, ours: Version) -> str:
    which = "older" if ours < theirs else "newer"
    return (
        f"speaks version {theirs}, this side {ours}, which is {which}: install releases whose minor "
        "versions are neighbours"
    )


@pytest.mark.parametrize("theirs", FAR, ids=str)
def test_a_launcher_of_another_release(job: Job, theirs: Version) -> None:
    """The master turns it away."""
    job.start(nodes="1:2", nproc=1)
    number = job.wait_for_steps(1)
    another = of_release(job, theirs)
    late = job.start(nodes="1:2", nproc=1, environ=another, log_level="WARNING")
    assert late.exit_code() == 1, job.dump()
    refusal = f"the master at {job.address}:{job.port} refuses this node: the agent"
    assert late.said() == f"elastic-run: {refusal} {misfit(theirs, WIRE)}\n", job.dump()
    job.wait_for_more_steps(number, 1)
    assert job.round() == number, job.dump()
    job.finish()
    job.ends(0, 1)


class Another(master_pb2_grpc.MasterServicer):
    """A master that takes every agent in, and says what it speaks."""

    def __init__(self, named: Version) -> None:
        self._named = pb.Version(major=named.major, minor=named.minor)

    def Attach(self, requests: Iterator[pb.FromAgent], context: Any) -> Iterator[pb.ToAgent]:
        next(requests)
        yield pb.ToAgent(welcome=pb.Welcome(version=self._named, epoch=1))


@pytest.mark.parametrize("theirs", FAR, ids=str)
def test_a_master_of_another_release(job: Job, theirs: Version) -> None:
    """The agent looks for itself, for a later master may not know what it cannot do."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_insecure_port(f"{job.address}:{job.port}")
    master_pb2_grpc.add_MasterServicer_to_server(Another(theirs), server)
    server.start()
    node = job.start("--rdzv-conf", "is_host=false", nodes="2", log_level="WARNING")
    job.ends(1)
    server.stop(None).wait()
    assert node.said() == f"elastic-run: the master {misfit(theirs, WIRE)}\n", job.dump()

"""Nodes on hosts of their own: pulled cables, lost hosts, and a DNS server that says nothing."""

import re
import signal
import socket

import pytest

from tests.e2e.harness import FORK, Job, processes
from tests.e2e.harness.network import Network, missing, start, with_resolver

pytestmark = pytest.mark.netns


@pytest.mark.parametrize(("flags", "script", "steps"), [((), "", 50), ((FORK,), "--torch", 0)])
def test_a_short_partition_ends_no_rank(
    job: Job, network: Network, flags: tuple[str, ...], script: str, steps: int
) -> None:
    """Shorter than the lease, and the node comes back by itself. Ranks that train together stand
    still meanwhile, and go on where they were."""
    for host in range(2):
        start(job, network, host, *flags, "--lease", "60", nodes="2", script=script)
    number = job.wait_for_steps(2)
    network.pull(1)
    job.wait_for_event("node1 is unreachable")
    job.wait_for_more_steps(number, 2, count=steps)
    network.plug(1)
    job.wait_for("node1 to be back", lambda: "attached" in job.events()[-1] or None)
    job.wait_for_more_steps(number, 2)
    assert job.round() == number, job.dump()
    job.finish()
    job.ends(0)


def test_a_long_partition_costs_the_node_its_place_until_it_is_back(
    job: Job, network: Network
) -> None:
    """DDP: those on the master's side go on without it, and grow again when it is there."""
    for host in range(3):
        flags = (FORK, "--lease", "2", "--last-call", "0.5")
        start(job, network, host, *flags, nodes="2:3", script="--torch")
    number = job.wait_for_steps(3)
    network.pull(2)
    lost = job.wait_for_event("node2 is lost")
    smaller = job.wait_for_steps(2, after=number)
    assert job.told("start", round=smaller)[0].fields["world"] == 2, lost
    network.plug(2)
    job.wait_for_steps(3, after=smaller)
    job.finish()
    job.ends(0)


def test_a_host_is_lost_with_all_its_processes(job: Job, network: Network) -> None:
    """Nothing answers there any more, not even with a refusal: the lease decides."""
    start(job, network, 0, "--lease", "2", nodes="1:2")
    second = start(job, network, 1, "--lease", "2", nodes="1:2")
    number = job.wait_for("both nodes in a round", lambda: _both(job))
    parts = (second.agent(), second.guardian)
    network.pull(1)
    processes.kill(second.guardian, number=signal.SIGSTOP)
    processes.kill(*parts)
    job.wait_for_steps(1, after=number)
    job.finish()
    job.ends(0, -signal.SIGKILL)


def _both(job: Job) -> int | None:
    number = job.round()
    return number if job.told("step", round=number, rank=1) else None


def test_a_master_that_dies_during_a_partition(job: Job, network: Network) -> None:
    first = start(job, network, 0, "--lease", "60", nodes="2")
    start(job, network, 1, "--lease", "60", nodes="2")
    number = job.wait_for_steps(2)
    network.pull(1)
    job.wait_for_event("node1 is unreachable")
    processes.kill(first.master())
    job.wait_for_event("master is back in epoch 2")
    network.plug(1)
    job.wait_for_event("node1 attached")
    job.wait_for_more_steps(number, 2)
    assert job.round() == number, job.dump()
    job.finish()
    job.ends(0)


@pytest.mark.soak
def test_a_link_that_carries_nothing_costs_one_of_its_ends(job: Job, network: Network) -> None:
    """Both work with others, so that neither is at fault, and the three that can train together do."""
    network.part(2, 3)
    for host in range(4):  # in this order they are paired
        flags = (FORK, "--precheck", "quick")
        start(job, network, host, *flags, nodes="3:4", script="--torch")
        job.wait_for_event(f"node{host} attached")
    said = job.wait_for_event("is kept out: the link between node2 and node3: ")
    assert re.search(r"; node[23] is kept out: ", said), said
    assert said.count("is kept out") == 1, said
    number = job.wait_for_steps(3)
    assert job.told("start", round=number)[0].fields["world"] == 3, job.dump()
    job.finish()
    job.ends(0)


@pytest.mark.parametrize("name", [pytest.param("", marks=pytest.mark.soak), "node0"])
def test_a_dns_server_that_says_nothing_costs_no_start(job: Job, name: str) -> None:
    """Torch's sockets ask for the names of addresses; each question would take 5 s. The endpoint's
    name is in a file, and nobody asks for it."""
    if why := missing():
        pytest.skip(f"no mount namespaces: {why}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((job.address, 53))  # takes questions, and never answers
        node = job.start(
            *("--rdzv-endpoint", f"{name or job.address}:{job.port}"),
            script=("--torch",),
            prefix=with_resolver(job.folder, job.address, f"{job.address} {name}" * bool(name)),
        )
        number = job.wait_for_steps(2)
        for _ in range(3):
            processes.kill(job.rank(number, 1))
            number = job.wait_for_steps(2, after=number)
        job.finish()
        job.ends(0)
        assert node.exit_code() == 0
        questions = _received(silent)
    assert questions, "nobody asked, so nothing was tried"
    assert not any(name.encode() in data for _, data in questions if name), "the name was asked for"
    assert len(questions) == len(set(questions)), "a question was asked again, after a time-out"


def _received(end: socket.socket) -> list[tuple[object, bytes]]:
    """Who asked, and what, with the number of the question."""
    end.setblocking(False)
    found: list[tuple[object, bytes]] = []
    while True:
        try:
            data, sender = end.recvfrom(4096)
        except BlockingIOError:
            return found
        found.append((sender, data))

"""Where the nodes of a job meet: names that mean another address on each node, or none yet."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from tests.e2e.harness import ROOT, Job, Node, processes
from tests.e2e.harness.network import Network, hosts_file, missing, with_names, with_resolver
from tests.e2e.harness.ports import listening

USAGE = 2


def start(
    job: Job,
    network: Network,
    number: int,
    names: str,
    *flags: str,
    nodes: str = "2",
    script: Sequence[str] = (),
) -> Node:
    """A launcher on host `number`, called node<number>, where these names are known."""
    prefix = (*network.on(number), *with_names(job.folder, f"node{number}", names))
    return job.start(
        *flags,
        nodes=nodes,
        nproc=1,
        prefix=prefix,
        environ={"GLOO_SOCKET_IFNAME": "eth0"},
        script=script,
    )


def static(number: int, endpoint: str) -> Sequence[str]:
    return ("--rdzv-backend", "static", "--node-rank", str(number), "--rdzv-endpoint", endpoint)


def c10d(number: int, endpoint: str) -> Sequence[str]:
    return ("--rdzv-endpoint", endpoint)


@pytest.mark.netns
@pytest.mark.parametrize(("form", "script"), [(static, ("--torch",)), (c10d, ())])
def test_a_master_whose_own_name_is_loopback_there(
    job: Job,
    network: Network,
    form: Callable[[int, str], Sequence[str]],
    script: Sequence[str],
) -> None:
    """As Debian and Ubuntu have it. Ranks meet at a store, and a knock finds out who is dead."""
    names = "10.77.0.1 node0\n127.0.1.1 node1"
    flags = ("--lease", "100", *form(1, "node0:29400"))
    master = ("--lease", "100", *form(0, "node0:29400"))
    first = start(job, network, 0, "127.0.1.1 node0", *master, script=script)
    second = start(job, network, 1, names, *flags, script=script)
    number = job.wait_for_steps(2)
    assert "no job token" in first.said(), job.dump()
    parts = (second.agent(), second.guardian)
    processes.kill(*parts, number=signal.SIGSTOP)  # so that neither has a word for the other's end
    processes.kill(*parts)
    job.wait_for_event("node1 is gone")
    start(job, network, 1, names, *flags, script=script)
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0, -signal.SIGKILL, 0)


@pytest.mark.netns
def test_three_launchers_on_two_hosts(job: Job, network: Network) -> None:
    """The second one on the master's host does not say that it is at 127.0.1.1 either."""
    for host, names in ((0, "127.0.1.1 node0"), (0, "127.0.1.1 node0"), (1, "10.77.0.1 node0")):
        start(job, network, host, names, *c10d(host, "node0:29400"), nodes="3")
    job.wait_for_steps(3)
    for node, address in zip(job.nodes, ("10.77.0.1", "10.77.0.1", "10.77.0.2"), strict=True):
        found = {host for host, port in listening(node.guardian) if port != 29400}
        assert found == {address}, job.dump()
    job.finish()
    job.ends(0)


@pytest.mark.netns
def test_a_master_behind_an_address_that_is_not_its_own(job: Job, network: Network) -> None:
    """NAT, a floating address, a service: node 0 of the static form is the host all the same."""
    program = (sys.executable, "-m", "tests.e2e.harness.proxy", network.address(0), "29400")
    command = (*network.on(2), *program, network.address(2), "29400")
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as way:
        try:
            for host in (0, 1):
                start(job, network, host, "", *static(host, f"{network.address(2)}:29400"))
            job.wait_for_steps(2)
            assert "10.77.0.3 is no address of this node" in job.nodes[0].said(), job.dump()
            assert "no address of this node" not in job.nodes[1].said(), job.dump()
            job.finish()
            job.ends(0)
        finally:
            way.kill()


@pytest.mark.netns
@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("10.77.0.1", "10.77.0.1"),  # a number is meant
        ("127.0.1.1", "127.0.1.1"),
        ("localhost", "127.0.0.1"),
        ("named", "10.77.0.1"),  # a name of one address that others reach
        ("node0", "::"),  # of IPv4 too, as grpc has it
    ],
)
def test_what_a_master_listens_on(job: Job, network: Network, endpoint: str, bound: str) -> None:
    node = start(job, network, 0, "127.0.1.1 node0\n10.77.0.1 named", *c10d(0, f"{endpoint}:29400"))
    master = node.master()
    found = job.wait_for(
        "its port", lambda: {a for a in listening(master) if a[1] == 29400} or None
    )
    assert {host for host, _ in found} == {bound}
    node.signal(signal.SIGTERM)
    job.ends(128 + signal.SIGTERM)


@pytest.mark.netns
def test_who_may_change_a_job_without_a_token(job: Job, network: Network) -> None:
    """The master's host alone, by loopback, though the master listens on every address."""
    start(job, network, 0, "127.0.1.1 node0", *c10d(0, "node0:29400"), nodes="1:2")
    number = job.wait_for_steps(1)

    def restart(host: int, address: str) -> subprocess.CompletedProcess[str]:
        ctl = (sys.executable, "-m", "elastic.ctl", "--master", f"{address}:29400", "restart")
        command = (*network.on(host), *ctl)
        return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    for host in (1, 0):
        assert "without a job token" in restart(host, "10.77.0.1").stderr, job.dump()
    assert job.round() == number
    assert restart(0, "127.0.0.1").returncode == 0, job.dump()
    job.wait_for_steps(1, after=number)
    job.finish()
    job.ends(0)


@pytest.mark.soak
@pytest.mark.netns
def test_names_that_come_later_than_the_nodes(job: Job, network: Network) -> None:
    """As a pod's with the pod: node 1 waits for the name, and for another address behind it."""
    node = start(job, network, 1, "", *static(1, "node0:29400"))
    job.wait_for("it to say so", lambda: "waiting for the address of node0 (" in node.said())
    hosts = hosts_file(job.folder, "node1")
    localhost = hosts.read_text()
    hosts.write_text(f"{localhost}10.77.0.3 node0\n")
    job.wait_for("a try", lambda: "waiting for a master at node0:29400" in node.said())
    hosts.write_text(f"{localhost}10.77.0.1 node0\n")
    start(job, network, 0, "10.77.0.1 node0", *static(0, "node0:29400"))
    job.wait_for_steps(2)
    assert node.said().count("waiting for the address") == 1
    job.finish()
    job.ends(0)


@pytest.mark.netns
@pytest.mark.parametrize("form", [static, c10d])
def test_a_signal_while_a_name_is_looked_up(
    job: Job, form: Callable[[int, str], Sequence[str]]
) -> None:
    """The name server does not answer, so the look-up itself lasts."""
    if why := missing():
        pytest.skip(f"no mount namespaces: {why}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((job.address, 53))
        server = with_resolver(job.folder, job.address)
        node = job.start(*form(1, "node0:29400"), nodes="2", prefix=server)
        assert silent.recv(1), "it asked"
        node.signal(signal.SIGTERM)
        job.ends(128 + signal.SIGTERM)
    assert node.said().splitlines()[-1] == "elastic-run: SIGTERM: ending", node.said()

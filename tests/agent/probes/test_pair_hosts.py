"""Four network namespaces as four nodes: `decide` and the pair probe find a bad link, and a bad node."""

import contextlib
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic.master.events import NodeId
from elastic.master.grouping import Group
from elastic.master.pair_results import Kind, Limits, Test
from elastic.master.pairing import Plan, decide
from tests.agent.probes.pairs import Probe, numbers, told_of
from tests.e2e.harness.network import Network, missing, run

pytestmark = [pytest.mark.netns, pytest.mark.soak]  # each waits for links of 40 Mbit/s

HOSTS = [NodeId(f"host{number}") for number in range(4)]
LIMITS = Limits(matmul_ratio=50, gather_ratio=1.5)
"""The four share the cores of one machine: what they compute at is nobody's speed."""
STORE = (
    "import sys; from torch._C._distributed_c10d import TCPStore;"
    "store = TCPStore('0.0.0.0', 0, is_master=True, wait_for_workers=False);"
    "print(store.port, flush=True); sys.stdin.read()"
)


class Hosts:
    def __init__(self, network: Network, deadline: float) -> None:
        self.network, self.deadline = network, deadline

    def slow_down(self, number: int, mbit: int, *, towards: int | None = None) -> None:
        """What a host sends, to all or to one."""
        tc = (*self.network.on(number), "tc")
        if towards is None:
            run(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10")
        class_ = "1:10" if towards is None else "1:20"
        rate = ("rate", f"{mbit}mbit", "burst", "64k")
        run(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", class_, "htb", *rate)
        if towards is not None:
            to = ("match", "ip", "dst", f"{self.network.address(towards)}/32")
            run(*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "u32", *to,
                "flowid", class_)  # fmt: skip

    def probe(self) -> tuple[Plan, int]:
        rounds: list[list[Test]] = []
        while True:
            plan = decide(dict.fromkeys(HOSTS, ""), {}, rounds, LIMITS)
            if not plan.groups:
                return plan, len(rounds)
            rounds.append([test for group in plan.groups for test in self._round(group)])

    def _round(self, group: Group) -> list[Test]:
        """One group after the other: on real nodes they have cores of their own."""
        on = {node_id: self.network.on(HOSTS.index(node_id)) for node_id in group.nodes}
        with contextlib.ExitStack() as stack:
            stores = {node_id: self._store(stack, HOSTS.index(node_id)) for node_id in group.nodes}
            meeting = ",".join(stores[pair[0]] for pair in group.pairs)
            flags = ("--device", "cpu", "--mib", "1", "--deadline", str(self.deadline),
                     "--pairs", numbers(group))  # fmt: skip
            ifname = ("env", "GLOO_SOCKET_IFNAME=eth0")
            probes = {
                node_id: Probe(meeting, rank, len(on), *flags, prefix=(*on[node_id], *ifname))
                for rank, node_id in enumerate(group.nodes)
            }
            said = {node_id: probe.end(4 * self.deadline) for node_id, probe in probes.items()}
        return told_of(group, said)

    def _store(self, stack: contextlib.ExitStack, number: int) -> str:
        """A host's, until the stack is closed."""
        server = stack.enter_context(
            subprocess.Popen(
                (*self.network.on(number), sys.executable, "-c", STORE),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        assert server.stdin
        assert server.stdout
        stack.callback(server.stdin.close)
        return f"{self.network.address(number)}:{server.stdout.readline().strip()}"


@pytest.fixture
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(f"no network namespaces: {why}")
    with Network(f"pair{secrets.token_hex(3)}", 4) as made:
        yield made


def limited(network: Network, deadline: float) -> Hosts:
    """All send 40 Mbit/s, which is what takes the time, however busy this machine is."""
    hosts = Hosts(network, deadline)
    try:
        for number in range(4):
            hosts.slow_down(number, 40)
    except OSError as error:
        pytest.skip(f"no htb in this kernel's tc: {error}")
    return hosts


def named(plan: Plan) -> set[tuple[Kind, tuple[NodeId, ...]]]:
    return {(verdict.kind, verdict.nodes) for verdict in plan.verdicts}


def test_a_slow_link_is_named(network: Network) -> None:
    """One sends 5 Mbit/s to another."""
    hosts = limited(network, 90)
    hosts.slow_down(2, 5, towards=3)
    plan, rounds = hosts.probe()
    assert named(plan) == {(Kind.LINK, (HOSTS[2], HOSTS[3]))}, plan.reason
    assert rounds <= 3


def test_a_host_whose_cable_is_out_is_named(network: Network) -> None:
    hosts = limited(network, 40)
    network.pull(1)
    plan, rounds = hosts.probe()
    assert named(plan) == {(Kind.NODE, (HOSTS[1],))}, plan.reason
    assert rounds <= 3

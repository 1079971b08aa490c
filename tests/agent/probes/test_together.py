"""What a node's processes say of its tests with others, as one answer."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from elastic.agent.probes import together
from elastic.agent.probes.run import Device
from elastic.agent.probes.together import of_all, read
from elastic.proto import master_pb2 as pb
from tests.agent.probes.healthy import CPU, PAIR, environ


def line(what: str = "", **figures: Any) -> bytes:
    said = {
        "probe": "pair",
        "ok": not what,
        "what": what,
        "figures": {"alone": False, "pairs": [], **figures},
    }
    return json.dumps(said).encode()


def met(outcome: str, what: str = "", gather: float = 0.5) -> dict[str, Any]:
    return {"with": 1, "outcome": outcome, "what": what, "gather_s": gather}


def test_what_one_process_says() -> None:
    pairs = [met("passed"), met("timed out", "no word"), met("failed", "a wrong byte")]
    said = read(line("with node 1: no word", matmul_s=0.25, pairs=pairs))
    assert (said.state, [*said.matmul]) == ("ok", [0.25])
    assert [(one.passed, one.late, one.what) for one in said.tests] == [
        (True, False, ""),
        (False, True, "no word"),
        (False, False, "a wrong byte"),
    ]
    assert said.tests[0].gather == 0.5


def test_who_is_not_told_where_to_meet_is_not_tested() -> None:
    """And so accused of nothing."""
    asked = pb.Pairs(nodes=2, first=[0], second=[1], device="cpu", devices=1, deadline=60.0)
    said = asyncio.run(together.Testing(asked, [CPU], {}, sys.executable).run())
    assert (said.state, len(said.tests)) == ("unknown", 0)


@pytest.mark.parametrize(
    ("what", "state"),
    [("matmul: Fault: 1 elements differ", "faulty"), ("matmul: OutOfMemoryError: CUDA", "unknown")],
)
def test_one_that_did_not_come_to_its_tests(what: str, state: str) -> None:
    said = read(line(what, alone=True))
    assert (said.state, said.what) == (state, what)


@pytest.mark.parametrize(
    "said", [b"", b"hello", b"[]", b"{}", b'{"what": "", "figures": 7}', line(pairs=[7])]
)
def test_nonsense_is_a_fault(said: bytes) -> None:
    found = read(said)
    assert found.state == "faulty"
    assert found.what.startswith("it printed ")


def test_a_node_is_as_slow_as_its_slowest_device_and_fails_with_one() -> None:
    devices = [
        read(line(matmul_s=0.1, pairs=[met("passed", gather=0.5), met("passed")])),
        read(line(matmul_s=0.2, pairs=[met("passed", gather=0.9), met("failed", "cut")])),
    ]
    found = of_all(devices, PAIR)
    assert (found.state, [*found.matmul]) == ("ok", [0.1, 0.2])
    assert [(one.passed, one.what) for one in found.tests] == [(True, ""), (False, "cut")]
    assert found.tests[0].gather == 0.9


def gpu(name: str) -> Device:
    return Device(label=f"gpu{name}", torch="cuda:0", nvml=name)


def test_the_device_at_fault_is_named_as_its_own_probe_names_it() -> None:
    """Also of those that CUDA_VISIBLE_DEVICES shows."""
    good, bad = read(line(matmul_s=0.1)), pb.Paired(state="faulty", what="it died")
    found = of_all([good, bad], [gpu("4"), gpu("5")])
    assert (found.state, found.what, found.gpu) == ("faulty", "it died", 5)
    assert not of_all([bad], [CPU]).HasField("gpu")
    assert not of_all([bad], [gpu("MIG-1")]).HasField("gpu")
    unknown = pb.Paired(state="unknown", what="no memory")
    assert of_all([unknown, bad], PAIR).state == "faulty"
    assert of_all([unknown, good], PAIR).state == "unknown"


@pytest.mark.parametrize("broken", [False, True])
def test_two_nodes_of_two_devices_each(tmp_path: Path, broken: bool) -> None:
    """broken: the second device of the second node."""
    fault = """
if sys.orig_argv[sys.orig_argv.index("--rank") + 1] == "3":
    torch.mm = lambda *args, **kwargs: 1 / 0
"""
    spoiled = environ(tmp_path / "site", torch_fault=fault if broken else "pass")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    async def run(node: int) -> pb.Paired:
        asked = pb.Pairs(
            prefix="t", nodes=2, node=node, first=[0], second=[1], device="cpu", devices=2, deadline=100.0,
            stores=[f"127.0.0.1:{store.port}"],
        )  # fmt: skip
        return await together.Testing(asked, PAIR, spoiled, sys.executable).run()

    async def both() -> list[pb.Paired]:
        return [*await asyncio.gather(run(0), run(1))]

    first, second = asyncio.run(both())
    (test,) = first.tests
    assert (first.state, len(first.matmul), test.passed) == ("ok", 2, not broken)
    assert second.state == ("faulty" if broken else "ok")
    assert ("ZeroDivisionError" in second.what) == broken

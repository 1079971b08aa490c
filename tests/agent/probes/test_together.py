"""What a node's processes say of its tests with others, as one answer."""

import asyncio
import json
import sys
from typing import Any

import pytest

from elastic.agent.probes import together
from elastic.agent.probes.together import of_all, read
from elastic.proto import master_pb2 as pb


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
    said = asyncio.run(together.Testing(asked, {}, sys.executable).run())
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
    found = of_all(devices)
    assert (found.state, [*found.matmul]) == ("ok", [0.1, 0.2])
    assert [(one.passed, one.what) for one in found.tests] == [(True, ""), (False, "cut")]
    assert found.tests[0].gather == 0.9


def test_the_device_at_fault_is_named_where_there_are_several() -> None:
    good, bad = read(line(matmul_s=0.1)), pb.Paired(state="faulty", what="it died")
    found = of_all([good, bad])
    assert (found.state, found.what, found.gpu) == ("faulty", "it died", 1)
    assert not of_all([bad]).HasField("gpu")
    unknown = pb.Paired(state="unknown", what="no memory")
    assert of_all([unknown, bad]).state == "faulty"
    assert of_all([unknown, good]).state == "unknown"

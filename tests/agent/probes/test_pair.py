"""The pair probe, as processes on one machine: it says what it found, and ends by its deadline."""

import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.agent.probes.healthy import environ
from tests.agent.probes.pairs import Probe

LONG = timedelta(seconds=120)
CPU = ("--device", "cpu", "--mib", "0.5")


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LONG)


@pytest.fixture
def address(store: TCPStore) -> str:
    return f"127.0.0.1:{store.port}"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="it takes four devices")
def test_two_nodes_of_two_gpus_each(address: str) -> None:
    flags = ("--device", "cuda", "--per-node", "2", "--deadline", "100")
    probes = [
        Probe(address, rank, 4, *flags, prefix=("env", f"CUDA_VISIBLE_DEVICES={rank}"))
        for rank in range(4)
    ]
    for rank, probe in enumerate(probes):
        said = probe.end(200)
        assert said["ok"], (rank, said)
        (with_other,) = said["figures"]["pairs"]
        assert (with_other["with"], with_other["outcome"]) == (1 - rank // 2, "passed")


def test_two_that_work(address: str) -> None:
    probes = [Probe(address, rank, 2, *CPU, "--deadline", "100") for rank in range(2)]
    for rank, probe in enumerate(probes):
        said = probe.end(200)
        assert said["ok"], said
        assert not said["figures"]["alone"]
        assert said["figures"]["matmul_s"] > 0
        (with_other,) = said["figures"]["pairs"]
        assert (with_other["with"], with_other["outcome"]) == (1 - rank, "passed")
        assert with_other["gather_s"] > 0
        assert with_other["gb_s"] > 0


def test_a_byte_that_changes_on_its_way(address: str, tmp_path: Path) -> None:
    """Of what the second sends; both see it."""
    fault = """
full = torch.full
torch.full = lambda *args, **kwargs: full(*args, **kwargs).index_fill_(0, torch.tensor([7]), 9.0)
"""
    folder = environ(tmp_path / "site", torch_fault=fault)["PYTHONPATH"]
    corrupt = ("env", f"PYTHONPATH={folder}")
    probes = [
        Probe(address, rank, 2, *CPU, "--deadline", "100", prefix=corrupt if rank else ())
        for rank in range(2)
    ]
    for probe in probes:
        (with_other,) = probe.end(200)["figures"]["pairs"]
        assert with_other["outcome"] == "failed"
        assert "what was gathered is not what was sent" in with_other["what"]


def test_pairs_of_three_nodes_two_processes_each(address: str) -> None:
    flags = (*CPU, "--deadline", "150", "--per-node", "2", "--pairs", "0-1,0-2,0-1")
    probes = [Probe(address, rank, 6, *flags) for rank in range(6)]
    said = [probe.end(250) for probe in probes]
    assert all(one["ok"] for one in said), said
    met = [[one["with"] for one in each["figures"]["pairs"]] for each in said]
    assert met == [[1, 2, 1]] * 2 + [[0, 0]] * 2 + [[0]] * 2


def test_who_waits_for_nobody_ends_in_time(address: str) -> None:
    said = Probe(address, 0, 2, *CPU, "--deadline", "15").end(100)
    (with_other,) = said["figures"]["pairs"]
    assert with_other["outcome"] == "timed out"
    assert "no word of it" in said["what"]
    assert not said["figures"]["alone"]


def test_one_that_stops_in_the_middle(address: str, store: TCPStore) -> None:
    """The other says so, goes on to its next pair, and is not held up."""
    flags = (*CPU, "--deadline", "40", "--pairs", "0-1,0-2")
    stopped = Probe(address, 1, 3, *flags)
    try:
        store.wait(["pairs/here/0/1"], LONG)
        stopped.process.send_signal(signal.SIGSTOP)
        probes = [Probe(address, rank, 3, *flags) for rank in (0, 2)]
        said, other = (probe.end(200) for probe in probes)
    finally:
        stopped.process.kill()
        stopped.process.communicate()
    outcomes = [one["outcome"] for one in said["figures"]["pairs"]]
    assert outcomes == ["timed out", "passed"], said
    assert other["ok"], other


@pytest.mark.skipif(torch.cuda.is_available(), reason="its device has to be missing")
def test_one_that_fails_alone(address: str) -> None:
    """It says so, and that its partner was not tested is no fault of the partner's."""
    fit = Probe(address, 0, 2, *CPU, "--deadline", "100")
    unfit = Probe(address, 1, 2, "--device", "cuda", "--deadline", "100")
    said = unfit.end(200)
    assert said["figures"]["alone"], said
    assert "opening the device" in said["what"]
    said = fit.end(200)
    assert [one["outcome"] for one in said["figures"]["pairs"]] == ["not tested"], said
    assert not said["figures"]["alone"]


def test_one_that_has_not_the_interface_fails_alone(address: str) -> None:
    flags = (*CPU, "--deadline", "100")
    fit = Probe(address, 0, 2, *flags)
    unfit = Probe(address, 1, 2, *flags, prefix=("env", "GLOO_SOCKET_IFNAME=nosuch0"))
    said = unfit.end(200)
    assert said["figures"]["alone"], said
    assert "opening the network: " in said["what"]
    said = fit.end(200)
    assert [one["outcome"] for one in said["figures"]["pairs"]] == ["not tested"], said


def test_a_store_that_nobody_serves_or_that_never_answers(address: str) -> None:
    """Costs the pairs that meet there, and no others."""
    with socket.socket() as closed, socket.socket() as silent:
        for one in (closed, silent):
            one.bind(("127.0.0.1", 0))
        silent.listen()
        ports = [one.getsockname()[1] for one in (closed, silent)]
        stores = ",".join([*(f"127.0.0.1:{port}" for port in ports), address])
        flags = (*CPU, "--deadline", "80", "--pairs", "0-1,0-2,0-3")
        probes = [Probe(stores, rank, 4, *flags) for rank in (0, 3)]
        said, other = (probe.end(200) for probe in probes)
    assert other["ok"], other
    assert not said["figures"]["alone"]
    first, second, third = said["figures"]["pairs"]
    assert [first["outcome"], second["outcome"], third["outcome"]] == ["failed", "failed", "passed"]
    for port, one in zip(ports, (first, second), strict=True):
        assert one["what"].startswith(f"no way to the store at 127.0.0.1:{port}: "), said

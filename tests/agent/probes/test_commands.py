"""`elasticctl probe` on this machine."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.agent.probes import healthy
from tests.e2e.harness import processes
from tests.e2e.harness.ports import free_port
from tests.elastic.asking import columns, elasticctl
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]


def ask(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(elasticctl(*args), capture_output=True, text=True, check=False)


def test_a_healthy_machine(tmp_path: Path) -> None:
    done = ask("probe", "--folder", str(tmp_path))
    assert done.returncode == 0, done
    head, *rows = done.stdout.splitlines()
    assert columns(head) == ["PROBE", "DEVICE", "VERDICT", "FIGURES"]
    assert ["matmul", "cpu", "ok", "tflops"] in [columns(row)[:4] for row in rows]
    assert ["disk", str(tmp_path), "ok"] in [columns(row)[:3] for row in rows]
    assert not done.stderr


def test_what_took_how_long(tmp_path: Path) -> None:
    done = ask("probe", "--verbose", "--folder", str(tmp_path))
    assert done.returncode == 0, done
    table = [columns(row) for row in done.stdout.splitlines()]
    parts = table[table.index(["PART", "DEVICE", "FROM", "SECONDS"]) + 1 :]
    assert {"torch", "device", "product", "matmul", "bandwidth"} <= {part[0] for part in parts}
    begun = [float(part[-2]) for part in parts]
    assert begun == sorted(begun)


def test_a_fault_as_json(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    done = ask("-o", "json", "probe", "--folder", missing)
    assert done.returncode == 1, done
    said = json.loads(done.stdout)
    assert (said["level"], said["state"]) == ("quick", "faulty")
    (bad,) = [probe for probe in said["probes"] if probe["state"] == "faulty"]
    assert (bad["probe"], bad["device"]) == ("disk", missing)
    assert bad["what"] == "there is no such folder"
    (disk,) = [part for part in said["parts"] if part["name"] == "disk"]
    assert disk["device"] == missing
    assert 0 <= disk["began"] <= disk["began"] + disk["seconds"] <= said["seconds"]


def test_several_machines(tmp_path: Path) -> None:
    """Where they meet a table of all is shown; one of them computes wrong."""
    endpoint = f"127.0.0.1:{free_port()}"
    path = healthy.environ(tmp_path / "site", torch_fault=healthy.CORRUPTS)["PYTHONPATH"]
    environs = [{**os.environ}, {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}]
    command = elasticctl("probe", "--nnodes", "2", "--rdzv-endpoint", endpoint)
    started = [
        subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for environ in environs
    ]  # fmt: skip
    said = [process.communicate(timeout=250) for process in started]
    assert [process.returncode for process in started] == [1, 1], said
    (shown,) = [out for out, _ in said if out]
    head, *rows = shown.splitlines()
    assert columns(head) == ["NODE", "VERDICT", "WHAT"]
    assert sorted(columns(row)[3] for row in rows) == ["faulty", "ok"], shown
    assert "elements of a product are wrong" in shown
    assert "1 of 2 nodes can train" in "".join(error for _, error in said)


def test_several_machines_meet_somewhere() -> None:
    done = ask("probe", "--nnodes", "2")
    assert done.returncode == 2
    assert "--nnodes wants --rdzv-endpoint HOST:PORT" in done.stderr


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("--level some", "invalid choice: 'some'"),
        ("--nnodes 0", "'0' is no number of machines"),
        ("--nnodes -3", "'-3' is no number of machines"),
        ("--nnodes 1:3", "'1:3' is no number of machines"),
        ("--folder /dev/null", "'/dev/null' is no folder"),
        ("--rdzv-endpoint h:1", "--rdzv-endpoint wants --nnodes N"),
        ("--nnodes 2 --rdzv-endpoint h:1 --folder /tmp", "--folder goes without --nnodes"),
        ("--nnodes 2 --rdzv-endpoint h:1 -v", "--verbose goes without --nnodes"),
        ("--exclude-straggler", "--exclude-straggler wants --nnodes N"),
    ],
)
def test_usage(line: str, hint: str) -> None:
    done = ask("probe", *line.split())
    assert done.returncode == 2
    assert hint in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_it_while_it_waits_for_the_others(tmp_path: Path, number: int) -> None:
    """Also one that reaches only its own process, not all of a terminal's."""
    command = elasticctl("probe", "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    environ = {**os.environ, "TMPDIR": str(tmp_path), processes.MARK: str(tmp_path)}
    started = subprocess.Popen(command, env=environ)
    try:
        wait_for("its launcher at work", lambda: any(tmp_path.glob("elastic-probe-*/probe/*")))
        started.send_signal(number)
        killed = number == signal.SIGKILL
        assert started.wait(60) == (-number if killed else 128 + number)
        wait_for("its end", lambda: not processes.belonging_to(tmp_path))
        assert killed or not list(tmp_path.glob("elastic-probe-*"))
    finally:
        processes.kill(*(process.pid for process in processes.belonging_to(tmp_path)))


def test_the_disk_of_the_temporary_folder_is_tried(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = elasticctl("-o", "json", "probe")
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    disks = [p["device"] for p in json.loads(done.stdout)["probes"] if p["probe"] == "disk"]
    assert disks == [str(tmp_path)]

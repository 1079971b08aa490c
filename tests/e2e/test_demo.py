"""`make demo`, small: the trainer under elastic-run, with a rank and a node killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
# A node takes seconds to come back: enough steps of 0.05 s must be left.
SMALL = (
    "--steps=300", "--save-interval=50", "--plain", "--timeout=240", "--vocab-size=300",
    "--corpus-bytes=60000",
)  # fmt: skip
TRAINER = (
    "--num-layers=1",
    "--hidden-size=64",
    "--num-attention-heads=2",
    "--seq-length=32",
    "--micro-batch-size=4",
    "--global-batch-size=16",
)

pytestmark = pytest.mark.xdist_group("demo")  # one run for all of them


def start(out: Path, *flags: str) -> subprocess.Popen[str]:
    """Start a demo that writes to `out`."""
    return subprocess.Popen(
        [sys.executable, "scripts/demo.py", f"--out={out}", *SMALL, *flags, "--", *TRAINER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def left_over(out: Path) -> list[str]:
    """Command lines of processes that have to do with the demo in `out`."""
    found = (p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"]))
    return [" ".join(line) for line in found if any(str(out) in word for word in line)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a whole demo printed, and its folder."""
    out = tmp_path_factory.mktemp("demo")
    process = start(out, f"--svg={out / 'demo.svg'}")
    try:
        output, _ = process.communicate(timeout=270)
    finally:
        process.terminate()
    assert process.returncode == 0, output
    return output, out


@pytest.fixture(scope="module")
def report(ran: tuple[str, Path]) -> dict[str, Any]:
    """The JSON that it wrote."""
    found: dict[str, Any] = json.loads((ran[1] / "report.json").read_text())
    return found


def test_the_job_succeeds_and_learns(report: dict[str, Any]) -> None:
    assert report["result"]["exit_code"] == 0
    assert report["step"] == 300
    assert report["demo"]["problems"] == []
    assert report["demo"]["last_loss"] < report["demo"]["first_loss"] - 0.5
    assert report["demo"]["sample"].startswith("def ")


def test_each_fault_is_told_from_the_others(report: dict[str, Any]) -> None:
    assert report["restarts_by_cause"] == {"killed": 1, "node lost": 1, "more nodes": 1}
    assert [i["cause"] for i in report["interruptions"]] == ["killed", "node lost", "more nodes"]
    assert report["rounds"] == 4


def test_training_goes_on_where_it_was(report: dict[str, Any]) -> None:
    assert [fault["what"] for fault in report["demo"]["faults"]] == [
        "rank 1 killed",
        "node-b killed",
        "node-b back",
    ]
    told = report["demo"]["faults"]
    lost = [fault["recovery"]["step_before"] - fault["resumed_from"] for fault in told]
    assert lost[0] <= 1, told  # the step that it was in
    # Steps whose copy was still on its way to the other node, which takes as long as beside training
    # it takes; from storage it would be 100, the last of its steps before the node is killed at 120.
    assert told[1]["resumed_from"] > 100, told
    assert lost[2] <= 0, told  # all ranks save before they end
    assert all(fault["recovery"]["step_before"] >= 60 for fault in told)


def test_the_seconds_add_up(report: dict[str, Any]) -> None:
    lost = report["seconds_lost_by_cause"]
    assert lost.keys() == {"start", "killed", "node lost", "more nodes"}
    assert all(seconds > 0 for seconds in lost.values())
    whole = report["productive_seconds"] + sum(lost.values())
    assert report["seconds"] == pytest.approx(whole, abs=0.01)
    assert 0 < report["goodput"] < 1
    assert report["goodput"] == pytest.approx(report["productive_seconds"] / whole, abs=0.001)
    for interruption in report["interruptions"]:
        assert 0 < interruption["downtime_seconds"] <= lost[interruption["cause"]] + 0.01


def test_plain_output_tells_the_story_line_by_line(ran: tuple[str, Path]) -> None:
    lines = ran[0].splitlines()
    told = [line for line in lines if "  fault  " in line or "  recovered  " in line]
    words = ["SIGKILL to rank 1", "rank 1 killed", "SIGKILL to all", "node-b killed", "node-b back"]
    assert len(told) == len(words), ran[0]
    assert all(word in line for word, line in zip(words, told, strict=True)), ran[0]
    assert not any("\x1b" in line for line in lines)
    assert any("goodput" in line for line in lines)


def test_the_picture_is_svg_and_loads_nothing_from_elsewhere(ran: tuple[str, Path]) -> None:
    picture = (ran[1] / "demo.svg").read_text()
    assert picture.startswith("<svg ")
    assert "url(http" not in picture
    assert "node&#160;lost" in picture


def test_nothing_is_left_running(ran: tuple[str, Path]) -> None:
    assert left_over(ran[1]) == []


def test_an_interrupt_ends_everything(tmp_path: Path) -> None:
    process = start(tmp_path)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "round 1: " in line:  # the ranks are being started
                break
        os.kill(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert left_over(tmp_path) == []

"""Real runs: processes, gloo, files, SIGKILL."""

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.trainer.watch import jsonl
from tests.trainer.launch import (
    ROOT,
    SCRIPT,
    SMALL,
    TIMEOUT,
    assert_same,
    finish,
    parameters,
    refused,
    start,
    steps,
)

pytestmark = pytest.mark.xdist_group("pretrain")  # one run for all of them

TP2 = ("--tensor-model-parallel-size=2", "--train-iters=3")
LENGTH = ("--train-iters=40", "--save-interval=3", "--eval-iters=2", "--eval-interval=30")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a run that nothing disturbed, and what that printed."""
    base = tmp_path_factory.mktemp("runs")
    return base, finish(start(base, "whole", *LENGTH))


@pytest.fixture
def base(whole: tuple[Path, str]) -> Path:
    return whole[0]


def test_a_run_tells_its_steps_and_learns(whole: tuple[Path, str]) -> None:
    base, output = whole
    assert " > padded vocab (size: 301) with 83 dummy tokens (new size: 384)\n" in output
    assert "number of parameters: 38272\n" in output
    line = r" \[.*\] iteration +40/ +40 \| consumed samples: +480 \| .* lm loss: .* grad norm: "
    assert re.search(line, output), output
    assert re.search(r"validation loss at iteration 30 on validation set \| lm loss", output)
    assert re.search(r"validation loss at iteration 40 on test set \| lm loss", output)
    losses = [loss for loss, _, _ in steps(base, "whole").values()]
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5]) - 1, losses


def test_a_run_that_is_killed_whole_goes_on_from_storage_and_ends_the_same(base: Path) -> None:
    killed = start(base, "killed", *LENGTH)
    assert killed.stdout is not None
    for _ in killed.stdout:
        if manifests.committed(Folder(Path(base / "killed"))) is not None:
            break
    everything = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    killed.communicate()  # until none is left that holds its pipes
    # Its launcher dies some milliseconds before its agent, which may persist what is newest:
    # not always a multiple of the interval.
    stored = manifests.committed(Folder(base / "killed"))
    assert stored is not None
    output = finish(start(base, "killed", *LENGTH))
    assert 0 < stored.step < 40
    assert f"resumed from step {stored.step}\n" in output, output
    assert_same(base, "whole", "killed")


def test_a_finished_run_started_again_has_nothing_to_do(base: Path) -> None:
    """Whatever number of threads it is offered: exact mode takes one."""
    output = finish(start(base, "whole", *LENGTH, env={"OMP_NUM_THREADS": "2"}))
    assert "resumed from step 40\n" in output
    assert "resumed with" not in output
    assert "nothing to train: 40 of 40 iterations are finished" in output
    assert "] iteration " not in output  # no log line


def test_what_would_be_another_run_is_refused_in_one_line(base: Path) -> None:
    """Here by the launcher, too; test_bad_input.py has more of them."""
    errors = refused(start(base, "whole", *LENGTH, "--seed=7"))
    assert "seed 1234, not 7: give the same value" in errors


def test_in_exact_mode_another_layout_has_to_be_asked_for(base: Path) -> None:
    two = ("--tensor-model-parallel-size=2", "--train-iters=40")
    errors = refused(start(base, "whole", *two, nproc=2))
    assert "was made with tensor parallel 1, not 2" in errors
    output = finish(start(base, "whole", *two, "--other-conditions", nproc=2))
    assert "resumed from step 40\n" in output


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no vectors"
)
def test_in_exact_mode_a_cpu_of_other_vectors_is_another_one(base: Path) -> None:
    errors = refused(start(base, "whole", *LENGTH, env={"ATEN_CPU_CAPABILITY": "default"}))
    assert re.search(r"was made with device cpu \w+, not cpu DEFAULT, so the run would", errors)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((*TP2,), "sequence parallel True, not False"),
        pytest.param(
            ("--pipeline-model-parallel-size=2", "--train-iters=3"),
            "tensor parallel 2, not 1",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_in_exact_mode_ranks_share_layers_as_they_did(
    tmp_path: Path, now: tuple[str, ...], said: str
) -> None:
    finish(start(tmp_path, "shared", *TP2, "--sequence-parallel", nproc=2))
    assert f"was made with {said}, so" in refused(start(tmp_path, "shared", *now, nproc=2))


@pytest.mark.soak
def test_in_exact_mode_a_pipeline_has_as_many_ranks_as_before(base: Path) -> None:
    two = ("--pipeline-model-parallel-size=2", "--train-iters=40")
    errors = refused(start(base, "whole", *two, nproc=2))
    assert "was made with pipeline parallel 1, not 2, so" in errors


def test_ranks_that_make_no_whole_replica_wait(tmp_path: Path) -> None:
    """The trainer says how many ranks a replica has; of three, two train, and a slot is idle."""
    finish(start(tmp_path, "unit", *TP2, nproc=3))
    told = jsonl.steps(tmp_path / "unit.jsonl")
    assert {step: line["world_size"] for step, line in told.items()} == {1: 2, 2: 2, 3: 2}
    (report,) = tmp_path.glob("logs/*/report.json")
    ended = json.loads(report.read_text())
    assert ended["restarts_by_cause"] == {"rank unit": 1}
    assert ended["failures"] == []


def test_weights_that_nobody_has_looked_at_are_not_saved(base: Path) -> None:
    """Numbers are read every twelfth step; what is newest in memory goes to storage when a run ends badly."""
    diverges = ("--train-iters=40", "--log-interval=12", "--lr=1e25", "--lr-warmup-iters=4")
    errors = refused(start(base, "diverged", *diverges))
    found = re.search(r"iteration (\d+): the gradient is not finite", errors)
    assert found is not None, errors
    stored = manifests.committed(Folder(base / "diverged"))
    assert stored is not None
    assert stored.step == int(found[1]) - 1, "the last step whose gradient was finite"
    weights = parameters(base, "diverged")
    assert [name for name, one in weights.items() if not one.isfinite().all()] == []


def test_the_master_knows_the_newest_metrics(tmp_path: Path) -> None:
    """Of a run that does not say where they are to go."""
    launched = (sys.executable, "-m", "elastic.run", "--standalone", f"--log-dir={tmp_path}")
    training = subprocess.Popen(
        [*launched, *SCRIPT, *SMALL, "--train-iters=100000"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    ask = (sys.executable, "-m", "elastic.ctl", "--dir", str(tmp_path), "-o", "json", "status")
    told: dict[str, Any] = {}
    try:
        assert training.stdout is not None
        for line in training.stdout:
            if "] iteration " in line:
                break
        deadline = time.monotonic() + 60
        while not told and time.monotonic() < deadline:
            answer = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=False)
            told = json.loads(answer.stdout or "{}").get("metrics") or {}
    finally:
        training.terminate()
        training.communicate(timeout=TIMEOUT)
    (written,) = tmp_path.glob("*/metrics.jsonl")
    assert told.get("kind") == "step", told
    assert told in list(jsonl.read(written))

"""Real runs: processes, gloo, files, SIGKILL."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.trainer.generate import load_model, main

ROOT = Path(__file__).parents[2]
SMALL = [
    "--vocab-size=300",
    "--corpus-bytes=60000",
    "--num-layers=1",
    "--hidden-size=32",
    "--seq-length=16",
    "--num-attention-heads=2",
    "--global-batch-size=5",
    "--lr-warmup-iters=2",
    "--log-interval=1",
]
"""A batch of 5, so that two ranks have unlike shares."""
STEPS = ("--steps=100", "--save-interval=3")


def start(base: Path, save: str, *flags: str, nproc: int = 1) -> subprocess.Popen[str]:
    """Start `nproc` ranks that share the data directory `base`/data and save in `base`/`save`."""
    command = [sys.executable, "-m", "elastic.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [f"--log-dir={base / 'logs'}", "-m", "elastic.trainer.pretrain_gpt"]
    command += [f"--data-dir={base / 'data'}", f"--save={base / save}", *SMALL, *flags]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # more spin, on a busy machine
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a started run to end well; returns what it printed."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    return output


def losses(output: str) -> dict[int, float]:
    """The loss of each step, as printed."""
    return {
        int(n): float(loss)
        for n, loss in re.findall(r"^step +(\d+)/.*loss ([\d.]+)", output, re.MULTILINE)
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with `data` and, in `whole`, a run that nothing disturbed; and what that printed."""
    base = tmp_path_factory.mktemp("runs")
    return base, finish(start(base, "whole", *STEPS))


@pytest.fixture
def base(whole: tuple[Path, str]) -> Path:
    return whole[0]


def test_a_run_tells_its_steps_and_what_it_has_learnt(whole: tuple[Path, str]) -> None:
    output = whole[1]
    assert output.startswith("starting from step 0\n")
    line = (
        r"step 100/100 \| loss \d\.\d{4} \| lr 3\.01e-04 \| [\d.]+ ms \| \d+ tokens/s \| world 1\n"
    )
    assert re.search(line, output), output
    assert losses(output).keys() == set(range(1, 101))
    assert "\nsample:\ndef " in output


def test_two_ranks_train_as_one_does(whole: tuple[Path, str]) -> None:
    base, output = whole
    two = finish(start(base, "two", "--steps=20", "--lr-decay-iters=100", nproc=2))
    assert "world 2" in two
    alone = losses(output)
    assert losses(two) == pytest.approx({step: alone[step] for step in range(1, 21)}, abs=2e-4)


def test_a_run_that_is_killed_whole_goes_on_from_storage_and_ends_the_same(base: Path) -> None:
    killed = start(base, "killed", *STEPS)
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

    output = finish(start(base, "killed", *STEPS))

    assert 0 < stored.step < 100
    assert output.startswith(f"resumed from step {stored.step}\n"), output
    whole, other = (load_model(base / save).state_dict() for save in ("whole", "killed"))
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_a_finished_run_started_again_has_nothing_to_do(base: Path) -> None:
    output = finish(start(base, "whole", *STEPS))
    assert output.startswith("resumed from step 100\nsample:\n")


def test_another_model_in_the_same_directory_is_refused_in_one_line(base: Path) -> None:
    process = start(base, "whole", "--hidden-size=48")
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 1  # the launcher's; the rank's was 2
    assert "hidden_size 32, not 48: give the same value or another --save\n" in errors
    assert "Traceback" not in errors


def test_generate_needs_only_what_training_saved(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--load={base / 'whole'}", "--prompt=class ", "--max-new-tokens=5"]) == 0
    assert capsys.readouterr().out.startswith("class ")


def test_generate_says_when_there_is_nothing_to_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([f"--load={tmp_path}"])
    assert "holds no checkpoint" in capsys.readouterr().err

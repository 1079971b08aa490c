"""Real runs: processes, gloo, files, SIGKILL."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic.trainer import checkpoint
from elastic.trainer.data import Batches
from elastic.trainer.generate import load_model, main
from elastic.trainer.prepare import prepare

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


def start(base: Path, save: str, *flags: str, nproc: int = 1) -> subprocess.Popen[str]:
    """Start `nproc` ranks that share the data directory `base`/data and save in `base`/`save`."""
    command = [sys.executable, "-m"]
    if nproc > 1:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m"]
    command += ["elastic.trainer.pretrain_gpt", f"--data-dir={base / 'data'}"]
    command += [f"--save={base / save}", *SMALL, *flags]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a started run to end well; returns what it printed."""
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `data` and, in `whole`, a run of six steps that nothing disturbed."""
    base = tmp_path_factory.mktemp("runs")
    output = finish(start(base, "whole", "--steps=6", "--save-interval=3"))
    assert output.startswith("starting from step 0\n")
    line = r"step 6/6 \| loss \d\.\d{4} \| lr 6\.95e-04 \| [\d.]+ ms \| \d+ tokens/s \| world 1\n"
    assert re.search(line, output), output
    assert "\nsample:\ndef " in output
    return base


def next_loss(base: Path, save: str) -> float:
    """Mean loss of the newest checkpoint on the step that would come next."""
    tokens = prepare(base / "data", vocab_size=300, max_bytes=60_000).tokens()
    step = checkpoint.newest(base / save)
    assert step == 6
    batches = Batches(tokens=tokens, seed=1234, global_batch_size=5, seq_length=16)
    with torch.no_grad():
        return float(load_model(base / save)(batches.local(step, 0, 1))) / (5 * 16)


def test_two_ranks_train_as_one_does(base: Path) -> None:
    output = finish(start(base, "two", "--steps=6", nproc=2))
    assert "world 2" in output
    assert next_loss(base, "two") == pytest.approx(next_loss(base, "whole"), abs=1e-5)


def test_a_killed_run_goes_on_and_ends_the_same(base: Path) -> None:
    killed = start(base, "killed", "--steps=6", "--save-interval=3")
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 4/"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (base / "killed" / ".step-00000006.safetensors.x.draft").write_bytes(b"torn")
    if checkpoint.newest(base / "killed") == 6:  # it was faster than the signal
        checkpoint.path_of(base / "killed", 6).unlink()

    output = finish(start(base, "killed", "--steps=6", "--save-interval=3"))

    assert output.startswith("resumed from step 3\n")
    whole, other = (load_model(base / save).state_dict() for save in ("whole", "killed"))
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_a_finished_run_started_again_has_nothing_to_do(base: Path) -> None:
    output = finish(start(base, "whole", "--steps=6", "--save-interval=3"))
    assert output.startswith("resumed from step 6\nsample:\n")


def test_another_model_in_the_same_directory_is_refused_in_one_line(base: Path) -> None:
    process = start(base, "whole", "--hidden-size=48")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "hidden_size 32, not 48: give the same value or another --save\n" in output
    assert "Traceback" not in output


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

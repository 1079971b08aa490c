"""Tiny runs of the trainer, one after another in one process: `runs.py`."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0 "
    "--attention-dropout 0 --mock-data --vocab-size 60 --make-vocab-size-divisible-by 16 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1 --train-iters 3 "
    "--eval-iters 0"
)
SAVED = "--save {base}/saved --save-interval 1"
"""Arguments of a run that others may begin from."""


def told(base: Path, runs: Mapping[str, str]) -> dict[str, Any]:
    """What each of `runs` did, by its name; runs: their arguments beside the common ones, {base} in them."""
    arguments = {
        name: f"{SMALL} {more}".replace("{base}", str(base)).split() for name, more in runs.items()
    }
    (base / "runs.json").write_text(json.dumps(arguments))
    program = Path(__file__).with_name("runs.py")
    command = [sys.executable, str(program), str(base / "runs.json"), str(base / "told.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((base / "told.json").read_text())
    return found

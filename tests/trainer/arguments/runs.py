"""The program of `tiny.py`: one tiny run after another in this process, a world of one.

    python runs.py RUNS.json TOLD.json

RUNS: names to arguments. TOLD: of each, what it printed without times, how it ended, and its files.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elastic.trainer.pretrain import pretrain
from elastic.trainer.pretrain_gpt import (
    forward_step,
    model_provider,
    train_valid_test_datasets_provider,
)

TIMES = r"\[\d{4}-[^]]*\]|elapsed time per iteration \(ms\): [\d.]+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


def told(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Of one run, whose own files are in `folder`."""
    sys.argv = ["pretrain_gpt", *(word.replace("{own}", str(folder)) for word in arguments)]
    output, status = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step)
        except SystemExit as ended:
            status = int(ended.code or 0)
            if dist.is_initialized():
                dist.destroy_process_group()  # which a rank that fails leaves to its end
    text = re.sub(TIMES, "", output.getvalue()).replace(str(folder), "")
    files = {
        re.sub(r"shard.*", "shard", str(file.relative_to(folder))) for file in folder.rglob("*")
    }
    return {"text": text, "status": status, "files": sorted(files)}


def main() -> None:
    runs, place = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    found = {}
    for number, (name, arguments) in enumerate(runs.items()):
        folder = place.parent / str(number)
        folder.mkdir()
        found[name] = told(arguments, folder)
    place.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

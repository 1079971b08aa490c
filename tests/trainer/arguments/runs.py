"""The program of `tiny.py`: one tiny run after another in this process, a world of one.

    python runs.py RUNS.json TOLD.json

RUNS: names to arguments. TOLD: of each, what it printed without times, how it ended, and its files.
--own-data, --own-loss and --own-threads are those of a script that is not quite right.
"""

import contextlib
import io
import json
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic.trainer.pretrain import get_args, pretrain
from elastic.trainer.pretrain_gpt import (
    forward_step,
    model_provider,
    train_valid_test_datasets_provider,
)

TIMES = r"\[\d{4}-[^]]*\]|elapsed time per iteration \(ms\): [\d.]+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


class Own:
    """The first samples of another dataset; from the fourth to the eighth nothing is learnt."""

    def __init__(self, whole: Any, size: int) -> None:
        self.whole, self.size = whole, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        item = self.whole[range(self.size)[number]]
        return item | {"loss_mask": item["loss_mask"] * (not 4 <= number < 8)}


def own_arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--own-data")
    parser.add_argument("--own-loss")
    parser.add_argument("--own-threads", type=int)
    return parser


def own_data(numbers: Any) -> Any:
    train, valid, test = train_valid_test_datasets_provider(numbers)
    found = {
        None: (train, valid, test), "none": (None, valid, test), "two": (train, valid),
        "few": (Own(train, 9), valid, test), "unmasked": (Own(train, 12), valid, test),
        "novalidation": (train, Own(train, 0), test), "asked": (Own(train, numbers[0]), valid, test),
    }  # fmt: skip
    return found[get_args().own_data]


def own_model(**parts: Any) -> Any:
    if get_args().own_threads is not None:
        torch.set_num_threads(get_args().own_threads)
    return model_provider(**parts)


def own_step(batches: Any, model: Any) -> Any:
    output, loss = forward_step(batches, model)

    def own(losses: Any) -> Any:
        total, count, reports = loss(losses)
        return total, count, {} if get_args().own_loss == "none" else reports | own_report(count)

    def own_report(count: Any) -> dict[str, float]:
        return {} if count else {"nothing": 1.0}

    return output, loss if get_args().own_loss is None else own


def told(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Of one run, whose own files are in `folder`."""
    sys.argv = ["pretrain_gpt", *(word.replace("{own}", str(folder)) for word in arguments)]
    output, status = io.StringIO(), 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            pretrain(own_data, own_model, None, own_step, extra_args_provider=own_arguments)
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

"""A rank that loads more than once in a round, and tells what it got, a line of JSON each."""

import json
import os
import sys
import time
from pathlib import Path

import torch

from elastic.checkpoint import Checkpointer
from elastic.proto.errors import CheckpointError

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def tell(kind: str, **fields: object) -> None:
    """Append one line, in one write."""
    round_ = int(os.environ.get("ELASTIC_ROUND", "1"))
    line = {"kind": kind, "rank": RANK, "round": round_, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(FOLDER / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def load(checkpoint: Checkpointer, state: dict[str, object], step: int | None = None) -> None:
    try:
        found = checkpoint.load(state, step=step)
        tell("loaded", step=found, own=own.tolist())
    except CheckpointError as error:
        tell("refused", why=str(error))


own = torch.full((3,), float(RANK))
everything: dict[str, object] = {"own": own}
tell("start")
with Checkpointer(FOLDER / "checkpoint") as first:
    load(first, everything, 0)
    load(first, everything)
    for number in range(1, 4):
        own += 1
        first.save(number, everything, persist=True)
    own.fill_(-1)
    load(first, everything)
    load(first, everything, 2)
    load(first, everything, 9)
with Checkpointer(FOLDER / "checkpoint") as second:
    own.fill_(-1)
    load(second, everything, 3)
tell("end")

"""A rank that begins from what it finds in FOLDER/other, which its first round saves in memory alone, and
saves to FOLDER/checkpoint once FOLDER/go is there; a line of JSON tells what it has. Ends once FOLDER/finish is.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Event

import torch

from elastic.checkpoint import Checkpointer

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
ROUND = int(os.environ["ELASTIC_ROUND"])


def tell(kind: str, **fields: object) -> None:
    """Append one line, in one write."""
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(FOLDER / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


own = torch.zeros(3)
state: dict[str, object] = {"own": own}
tell("start")
if ROUND == 1:
    with Checkpointer(FOLDER / "other") as first:
        for number in range(1, 4):
            own += 1
            first.save(number, state)
    tell("step", step=3)
    signal.pause()
with Checkpointer(FOLDER / "checkpoint", persist_every=1) as checkpoint:
    step = checkpoint.load(state)
    if not step:
        with Checkpointer(FOLDER / "other", read_only=True) as other:
            step = other.load(state)
    tell("loaded", step=step, own=own.tolist())
    while not (FOLDER / "go").exists():
        Event().wait(0.05)
    while not (FOLDER / "finish").exists():
        step += 1
        own += 1
        tell("computed", step=step)
        checkpoint.save(step, state)
        tell("step", step=step)
        Event().wait(0.1)
tell("end")

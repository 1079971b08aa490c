"""A rank that saves a tensor a few times to any storage, and tells what it finds there.

FOLDER URL OPTIONS STEPS [--pin STEP] [--block STEP]: OPTIONS are the storage's, as JSON. The value of a
step is its distance to 2. --block: put a file in the way of that step's folder, and take it away again
once `wait` has said so.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch

from elastic.checkpoint import Checkpointer
from elastic.proto.errors import CheckpointError

PARSER = argparse.ArgumentParser()
PARSER.add_argument("folder", type=Path)
PARSER.add_argument("url")
PARSER.add_argument("options", type=json.loads)
PARSER.add_argument("steps", type=int)
PARSER.add_argument("--pin", type=int)
PARSER.add_argument("--block", type=int)
ARGS = PARSER.parse_args()


def tell(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": int(os.environ["RANK"]), "round": 1, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(ARGS.folder / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    state = {"w": torch.zeros(5000)}
    with Checkpointer(
        ARGS.url, persist_every=1, keep=1, keep_best=1, storage_options=ARGS.options
    ) as checkpoint:
        start = checkpoint.load(state)
        tell("loaded", step=start, w=sorted(set(state["w"].tolist())), latest=checkpoint.latest)
        for step in range(start + 1, start + ARGS.steps + 1):
            state["w"].fill_(step)
            way = Path(ARGS.url, f"step-{step:08}")
            if step == ARGS.block:
                way.write_text("in the way")
            checkpoint.save(step, state, value=torch.tensor(float(abs(step - 2))))
            try:
                checkpoint.wait()
            except CheckpointError as error:
                tell("stalled", step=step, why=str(error))
                way.unlink()
                while checkpoint.latest != step:
                    time.sleep(0.05)
            if step == ARGS.pin:
                checkpoint.pin(step)
        tell("end", latest=checkpoint.latest)


if __name__ == "__main__":
    main()

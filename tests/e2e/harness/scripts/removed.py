"""Two ranks that are killed, and their storage with them, the instant that both have returned from a save;
started again they go on, and tell what they have, a line of JSON each. Ends once FOLDER/finish is there.

FOLDER URL OPTIONS [SERVER]: OPTIONS are the storage's, as JSON; SERVER: the pid of what serves it, else it
is a folder, in whose place a file is put.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import xxhash

from elastic.checkpoint import Checkpointer

FOLDER, URL, OPTIONS, *SERVER = sys.argv[1:]
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["ELASTIC_ROUND"])
STORED, LAST = 2, 5
"""The step that was on storage, and the one after whose save all is gone."""


def tell(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(Path(FOLDER, "told.jsonl"), "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def remove() -> None:
    """Whose save returns first leaves his pid, whose returns second removes all."""
    other = Path(FOLDER, "saved")
    try:
        other.symlink_to(str(os.getpid()))
    except FileExistsError:
        if SERVER:
            os.kill(int(SERVER[0]), signal.SIGKILL)
        else:
            shutil.rmtree(URL)
            Path(URL).write_text("in the way")
        for pid in (int(os.readlink(other)), os.getpid()):
            os.kill(pid, signal.SIGKILL)
    signal.pause()


def main() -> None:
    tell("start")
    state = {"own": torch.zeros(100_000)}
    with Checkpointer(URL, storage_options=json.loads(OPTIONS)) as checkpoint:
        step = checkpoint.load(state)
        while True:
            digest = xxhash.xxh3_64_hexdigest(state["own"].numpy().tobytes())
            tell("step" if step else "begin", step=step, digest=digest)
            if Path(FOLDER, "finish").exists():
                return
            step += 1
            state["own"].normal_(generator=torch.Generator().manual_seed(2 * step + RANK))
            checkpoint.save(step, state, persist=step == STORED or (bool(SERVER) and step >= LAST))
            if step == STORED:
                checkpoint.wait()
            elif step == LAST and ROUND == 1:
                remove()
            time.sleep(0.02)


main()

"""A rank on a device of its own, which saves in every way and, after a death, loads; and tells each time
whether it has a context on device 0. It does not call `torch.cuda.set_device`, as some scripts do not.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic.checkpoint import Checkpointer

FOLDER = Path(sys.argv[1])
RANK, LOCAL, ROUND = (int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "ELASTIC_ROUND"))


def tell(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), "at": 0.0, **fields}
    line["first"] = torch._C._cuda_hasPrimaryContext(0)  # type: ignore[attr-defined]
    with open(FOLDER / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    dist.init_process_group("gloo")
    for way in ("shadow", "stream", "sync"):
        state: dict[str, Any] = {
            "w": torch.full((5 << 20,), float(ROUND), device=f"cuda:{LOCAL}"),
            "n": ROUND,
        }
        with Checkpointer(FOLDER / way, snapshot=way) as checkpoint:
            step = checkpoint.load(state)
            tell("loaded", way=way, step=step, n=state["n"], all=bool((state["w"] == 1).all()))
            if not step:
                checkpoint.save(1, state, persist=True)  # which waits until memory is ready
                checkpoint.wait_ready(every=True)
                checkpoint.save(2, state)
                checkpoint.wait()
        tell("closed", way=way)
    dist.barrier()
    if ROUND == 1:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

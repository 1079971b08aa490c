"""Ranks that are forks of this process, so that torch is imported once."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

TIMEOUT = timedelta(seconds=120)


def run_by_size(sizes: Mapping[str, int], folder: Path, act: Callable[[str], None]) -> None:
    """Have the ranks of a Gloo group do `act` of each name, in a world of that name's size.

    folder: for the groups' stores. Raises SystemExit where a rank fails.
    """
    for size in sorted(set(sizes.values())):
        names = [name for name, wanted in sizes.items() if wanted == size]
        store = folder / f"store-{size}"
        for rank in range(size):
            if os.fork() == 0:
                _be(rank, size, store, act, names)
        ended = [os.wait()[1] for _ in range(size)]
        if any(ended):
            raise SystemExit(f"ranks of {size} ended with {ended}")


def _be(
    rank: int, size: int, store: Path, act: Callable[[str], None], names: Sequence[str]
) -> None:
    """Be a rank; does not return."""
    code, name = 1, ""
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(str(store), size),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
        )
        for name in names:
            act(name)
        dist.barrier()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may go on in a fork
        sys.stderr.write(f"{name}, rank {rank}:\n")
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

"""Programs that try something in worlds of many sizes. Ranks are forks of the program's process, so that
torch is imported once; each leaves what it found in FOLDER/<name>.<rank>.json."""

import gc
import json
import logging
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do, so that each fork would
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parents[2]
TIMEOUT = timedelta(seconds=120)
_RUN = """
import gc, runpy, sys
gc.disable()  # an import's objects stay: to look for garbage among them takes a fifth of its time
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def told(program: str, folder: Path, sizes: Mapping[str, int], *words: str) -> dict[str, list[Any]]:
    """Run `program FOLDER words`; what each rank of each name found."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, program, folder, *words],
        cwd=ROOT,
        env=os.environ
        | {
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a fork has no pool of processes, either
            "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else each kind of vectors is tried by three compiles
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(size)]
        for name, size in sizes.items()
    }


def main(sizes: Mapping[str, int], find: Callable[[str], Any]) -> None:
    """Be that program. find: what a rank finds of a name, in a world of its size."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork has no pool of threads
    gc.freeze()
    gc.enable()
    folder = Path(sys.argv[1])

    def act(name: str) -> None:
        (folder / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(find(name)))

    _run_by_size(sizes, folder, act)


def whole(tensor: Tensor) -> Tensor:
    """All of it, wherever its pieces are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _run_by_size(sizes: Mapping[str, int], folder: Path, act: Callable[[str], None]) -> None:
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
        store.unlink(missing_ok=True)  # there may be another such world
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

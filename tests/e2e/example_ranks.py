"""Runs examples in worlds of several sizes: `python -m tests.e2e.example_ranks FOLDER NAME.SIZE ...`. Ranks are
forks of this process, so that torch is imported once; what rank 0 prints is in FOLDER/NAME.SIZE."""

import os
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch._dynamo  # optimizers do, so that each fork would
from torch._C._distributed_c10d import TCPStore

from elastic.agent.prctl import set_pdeathsig

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, size: int, printed: Path) -> None:
    port, server = served()
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            be(name, rank, size, port, printed)
    ended = [os.waitpid(rank, 0)[1] for rank in ranks]
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    if any(ended):
        raise SystemExit(f"{name}: ranks of {size} ended with {ended}")


def served() -> tuple[int, int]:
    """A store's port, and the process that has it: its threads are none that are forked."""
    reader, writer = os.pipe()
    server = os.fork()
    if server == 0:
        set_pdeathsig()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        signal.pause()
    os.close(writer)
    port = int(os.read(reader, 16))
    os.close(reader)
    return port, server


def be(name: str, rank: int, size: int, port: int, printed: Path) -> None:
    """Be a rank; does not return."""
    code = 1
    set_pdeathsig()
    try:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
        if rank == 0:
            sys.stdout = printed.open("w")
        sys.argv = [name, "--epochs=3"]
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        sys.stdout.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may go on in a fork
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork has no pool of threads
    for one in sys.argv[2:]:
        example, _, world = one.partition(".")
        run(example, int(world), Path(sys.argv[1], one))

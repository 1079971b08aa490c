"""`python -m tests.trainer.parallel.layouts FOLDER`: one step's loss and gradients under each layout,
against one process without any.

Ranks are forks of this process, so torch is imported once. Leaves FOLDER/<layout>.json: how far off the
loss and each gradient are, relatively, and what collectives the forward pass of a block made.
"""

import json
import logging
import os
import sys
import traceback
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.grid import Grid
from elastic.trainer.parallel.sharding import begin_leaf, shard
from elastic.trainer.parallel.tensor import TensorParallel
from tests.trainer.model.shapes import ALL

LEAVES = 4
"""Of two samples each."""


COLLECTIVES = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}


class Layout(NamedTuple):
    shape: str
    dp: int = 1
    tp: int = 1
    sequence: bool = False
    stage: int = 1


LAYOUTS = {
    "gpt2": Layout("gpt2"),
    "gpt2-dp3": Layout("gpt2", dp=3),
    "gpt2-dp2-zero0": Layout("gpt2", dp=2, stage=0),
    "gpt2-dp2-zero2": Layout("gpt2", dp=2, stage=2),
    "gpt2-dp2-zero3": Layout("gpt2", dp=2, stage=3),
    "gpt2-tp2": Layout("gpt2", tp=2),
    "gpt2-tp4": Layout("gpt2", tp=4),
    "gpt2-tp2-sp": Layout("gpt2", tp=2, sequence=True),
    "gpt2-dp2-tp2-sp-zero3": Layout("gpt2", dp=2, tp=2, sequence=True, stage=3),
    "gpt2-dp2-tp2-zero0": Layout("gpt2", dp=2, tp=2, stage=0),
    "llama-tp2": Layout("llama", tp=2),
    "llama-dp2-tp2-sp": Layout("llama", dp=2, tp=2, sequence=True),
    "mixed-tp2-sp": Layout("mixed", tp=2, sequence=True),
}


def batch() -> Tensor:
    """All leaves, [LEAVES, 2, S + 1]."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 320, (LEAVES, 2, 17), generator=generator)


def losses(model: GPT, samples: Tensor) -> Tensor:
    targets = samples[:, 1:]
    share = torch.full(targets.shape, 1 / (LEAVES * targets.numel()))
    loss: Tensor = model(samples[:, :-1], targets, share)[0]
    return loss


def reference(shape: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, which knows nothing of layouts."""
    model = GPT(ALL[shape])
    initialize(model, ALL[shape], 1234, 0.05)
    total = torch.stack([losses(model, samples) for samples in batch()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), gradients


def step(layout: Layout) -> tuple[float, dict[str, Tensor], dict[str, int]]:
    """The same under a layout; and a block's collectives in forward, by kind."""
    grid = Grid.of(dist.get_world_size(), tp=layout.tp, pp=1)
    mesh = init_device_mesh("cpu", (grid.dp, grid.tp), mesh_dim_names=("dp", "tp"))
    config = ALL[layout.shape]
    tp = TensorParallel(mesh=mesh["tp"] if layout.tp > 1 else None, sequence=layout.sequence)
    with torch.device("meta"):
        model = GPT(config, tp)
    shard(model, mesh["dp"], stage=layout.stage, compute=torch.float32, reduce=torch.float64)
    model.to_empty(device="cpu")
    initialize(model, config, 1234, 0.05)
    mine = batch()[grid.place(dist.get_rank()).dp :: grid.dp]
    total = torch.zeros(())
    for number in range(-(-LEAVES // grid.dp)):
        last = number == -(-LEAVES // grid.dp) - 1
        begin_leaf(model, stage=layout.stage, last=last)  # type: ignore[arg-type]
        samples = mine[number] if number < len(mine) else batch()[0]
        loss = losses(model, samples) * (number < len(mine))  # the others' leaves are padding
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    dist.all_reduce(total, group=mesh["dp"].get_group())
    gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return float(total), gradients, collectives(model, config.hidden_size, layout)


def collectives(model: GPT, width: int, layout: Layout) -> dict[str, int]:
    with Counted() as counted, torch.no_grad():
        length = 16 // (layout.tp if layout.sequence else 1)
        model.blocks["0"](torch.zeros(2, length, width))
    return dict(counted.calls)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.removesuffix(".default")
        if func.namespace == "_c10d_functional" and name in COLLECTIVES:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(folder: Path, rank: int, name: str, layout: Layout) -> None:
    """Be a rank; does not return."""
    code = 1
    try:
        size = layout.dp * layout.tp
        store = FileStore(str(folder / f"store-{name}"), size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        loss, gradients, made = step(layout)
        if rank == 0:
            wanted, by_name = reference(layout.shape)
            off = {
                name: float((gradients[name] - one).norm() / one.norm())
                for name, one in by_name.items()
            }
            told = {"loss": abs(loss / wanted - 1), "gradients": off, "collectives": made}
            (folder / f"{name}.json").write_text(json.dumps(told))
        dist.barrier()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may go on in a fork
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # a fork has no pool of threads
    for name, layout in LAYOUTS.items():
        for rank in range(layout.dp * layout.tp):
            if os.fork() == 0:
                run(folder, rank, name, layout)
        ended = [os.wait()[1] for _ in range(layout.dp * layout.tp)]
        if any(ended):
            raise SystemExit(f"{name}: ranks ended with {ended}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

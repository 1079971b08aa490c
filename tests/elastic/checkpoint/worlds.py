"""`python -m tests.elastic.checkpoint.worlds FOLDER LAYOUT ...`: saves under each, loads under each.

Ranks are forks of this process, so torch is imported once. What is wrong is left in FOLDER, one file
for each rank of each layout that loads: JSON, by the layout that saved.
"""

import functools
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers do, so that each fork would
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from elastic.checkpoint.load import files
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import header_bytes, parse
from elastic.checkpoint.state.planner import Planner
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest, sums

STEP = 1
TIMEOUT = timedelta(seconds=60)


class Model(nn.Module):
    """Dims that no world divides, a tie, a frozen part, one without gradients, buffers, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.hidden = nn.Linear(6, 8, bias=False)
        self.odd = nn.Linear(8, 7)
        self.norm = nn.BatchNorm1d(7)
        self.small = nn.Linear(6, 2, bias=False)
        self.one = nn.Linear(2, 1)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.low = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
        self.extra: torch.Tensor
        self.register_buffer("extra", torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.frozen(h) + self.low(h.bfloat16()).float()
        mixed = self.norm(self.odd(self.hidden(h))) * self.head(h)
        loss: torch.Tensor = mixed.square().mean() + self.one(self.small(h)).sum()
        return loss


# --- layouts: a module in, what a script trains with out -----------------------------------------


@functools.cache
def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One each: they make process groups."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=names[-len(sizes) :])


def plain(model: Model, *_: int) -> nn.Module:
    return model


def ddp(model: Model, *_: int) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fsdp(model: Model, *sizes: int) -> nn.Module:
    """One dim: FSDP2; two: replicated over the first, sharded over the second."""
    mesh = mesh_of(sizes, ("replicate", "shard"))
    fully_shard(model.low, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def parallel(model: Model, *sizes: int) -> nn.Module:
    """Tensor parallel over the last dim, FSDP2 over the first."""
    mesh = mesh_of(sizes, ("dp", "tp"))
    plan = {
        "hidden": ColwiseParallel(),
        "odd": RowwiseParallel(),
        "low": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    if len(sizes) > 1:
        fully_shard(model.low, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def placed(*placements: Placement) -> Callable[..., nn.Module]:
    """Every parameter with the same placements, as far as it has such a dim; even over no dim."""

    def build(model: Model, *sizes: int) -> nn.Module:
        mesh = mesh_of(sizes, ("a", "b"))
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in made:
                    most = parameter.dim() - 1
                    mine = [
                        Shard(min(p.dim, most)) if isinstance(p, Shard) else p for p in placements
                    ]
                    tensor = placed_like(parameter.detach(), mesh, mine)
                    made[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
                setattr(module, name, made[id(parameter)])
        return model

    return build


def placed_like(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)  # every rank has it


Layout = tuple[Callable[..., nn.Module], tuple[int, ...], int]
"""What builds it, the mesh, and the ranks of a node."""
LAYOUTS: dict[str, Layout] = {
    "plain-1": (plain, (1,), 1),
    "plain-2": (plain, (2,), 2),
    "ddp-1": (ddp, (1,), 1),
    "ddp-2": (ddp, (2,), 2),
    "ddp-3": (ddp, (3,), 3),
    "ddp-4, 2 nodes": (ddp, (4,), 2),
    "fsdp-1": (fsdp, (1,), 1),
    "fsdp-2": (fsdp, (2,), 2),
    "fsdp-3": (fsdp, (3,), 3),
    "fsdp-4": (fsdp, (4,), 4),
    "hsdp-2x1": (fsdp, (2, 1), 2),
    "hsdp-2x2, 2 nodes": (fsdp, (2, 2), 2),
    "tp-2": (parallel, (2,), 2),
    "fsdp+tp-2x2": (parallel, (2, 2), 4),
    "replicate x shard-2x2": (placed(Replicate(), Shard(1)), (2, 2), 4),
    "shard x shard-2x2": (placed(Shard(0), Shard(1)), (2, 2), 4),
    "shard twice-2x2": (placed(Shard(0), Shard(0)), (2, 2), 2),
    "shard-3": (placed(Shard(1)), (3,), 3),
}


def world(name: str) -> int:
    return torch.Size(LAYOUTS[name][1]).numel()


def made(name: str, seed: int) -> dict[str, Any]:
    build, sizes, _ = LAYOUTS[name]
    torch.manual_seed(seed)
    model = build(Model(), *sizes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return {"model": model, "optimizer": optimizer, "note": {"seed": seed}}


def step(name: str, state: dict[str, Any]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    if "shard" in name.split("-")[0]:  # not every operation knows every placement
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter is not model.unused:
                whole = torch.randn(parameter.shape, dtype=parameter.dtype)
                parameter.grad = placed_like(whole, parameter.device_mesh, parameter.placements)
        model.norm.running_mean.normal_()
    else:
        model(torch.tensor([0, 3, 3, 6, 2])).backward()
    optimizer.step()


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All of the state, by names of this test's own."""
    found: dict[str, torch.Tensor] = {}
    names: dict[nn.Parameter, str] = {}
    for name, parameter in state["model"].named_parameters():
        names[parameter] = name.removeprefix("module.")
    for name, tensor in state["model"].state_dict().items():
        found[name.removeprefix("module.")] = tensor
    for parameter, values in state["optimizer"].state.items():
        found |= {f"{names[parameter]} {key}": value for key, value in values.items()}
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A collective, where it is sharded."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


# --- saving and loading --------------------------------------------------------------------------


def place(name: str) -> Place:
    node = LAYOUTS[name][2]
    rank = dist.get_rank()
    return Place(rank=rank, world_size=world(name), local_rank=rank % node, local_world_size=node)


def save(folder: Path, name: str) -> None:
    state = made(name, seed=1)
    step(name, state)
    write(folder / name, state, place(name))
    truth = {key: whole(tensor) for key, tensor in tensors(state).items()}
    if dist.get_rank() == 0:
        save_file(truth, folder / f"{name}.truth")


def write(folder: Path, state: dict[str, Any], here: Place) -> None:
    """Save it, on every rank, as an agent would: step 1 of the checkpoint in `folder`."""
    path = folder / manifest.folder(STEP)
    path.mkdir(parents=True, exist_ok=True)
    mine = Planner(here).share(state)
    out = bytearray(mine.image.nbytes)
    chunks = copy_cpu.write(mine.image, mine.tensors, mine.values, memoryview(out))
    out[mine.image.sums_at :] = sums.pack(chunks)
    (path / manifest.file(here.rank, here.world_size, 1, "j")).write_bytes(out)
    dist.barrier()
    if here.rank == 0:
        written = manifest.Manifest(
            job="j", sequence=1, round=1, step=STEP, world_size=here.world_size,
            shards=tuple(shard(path, rank, here.world_size) for rank in range(here.world_size)),
        )  # fmt: skip
        (path / manifest.NAME).write_text(manifest.dumps(written))


def read(folder: Path, state: dict[str, Any], here: Place) -> str:
    """Load it; what was complained of. Raises `CheckpointError`."""
    found, complaints = files.sources(Folder(folder), STEP)
    order = sorted(found, key=lambda rank: (rank != here.rank, rank))
    restore = Restore([found[rank] for rank in order], here)
    restore.apply(state, strict=True)
    return "; ".join([*complaints, *restore.damaged])


def shard(path: Path, rank: int, world_size: int) -> manifest.Shard:
    name = manifest.file(rank, world_size, 1, "j")
    data = (path / name).read_bytes()
    image = parse(data[: header_bytes(data)], len(data))
    digest = sums.checksum(data[image.sums_at :])
    return manifest.Shard(rank=rank, file=name, bytes=len(data), digest=digest)


def load(folder: Path, name: str) -> None:
    here = place(name)
    wrong = {
        file.stem: list(compare(folder, file.stem, name, here))
        for file in sorted(folder.glob("*.truth"))
    }
    (folder / f"{name}.{here.rank}.json").write_text(json.dumps(wrong))


def compare(folder: Path, saved: str, name: str, here: Place) -> Iterator[str]:
    state = made(name, seed=2)
    error = ""
    try:
        error = read(folder / saved, state, here)
    except Exception as failed:  # noqa: BLE001 - whatever it is, it is told
        error = f"{type(failed).__name__}: {failed}"
    failures = torch.tensor(int(bool(error)))
    dist.all_reduce(failures)
    if failures:
        yield error
        return
    truth, loaded = load_file(folder / f"{saved}.truth"), tensors(state)
    if truth.keys() != loaded.keys():
        yield f"other tensors: {sorted(truth.keys() ^ loaded.keys())}"
    for key in truth.keys() & loaded.keys():
        if not same(truth[key], loaded[key]):
            yield f"{key} is {loaded[key]}, not {truth[key]}"
    inner = getattr(state["model"], "module", state["model"])
    if inner.head.weight is not inner.embed.weight:
        yield "the tie is gone"
    if state["note"] != {"seed": 1}:
        yield f"the note is {state['note']}"


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit; `one` is whole, `other` may be sharded."""
    if isinstance(other, DTensor):
        if all(type(placement) in (Shard, Replicate) for placement in other.placements):
            one = placed_like(one, other.device_mesh, other.placements).to_local()
            other = other.to_local()
        else:  # strided shards, where FSDP and TP share a dim
            other = other.full_tensor()
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (one, other)))


# --- ranks ---------------------------------------------------------------------------------------


def ranks(folder: Path, act: Callable[[Path, str], None], size: int, names: list[str]) -> None:
    """Fork the ranks of a world, and wait for them. Raises where one fails."""
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            run(folder, act, size, rank, names)
        pids.append(pid)
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status:
            for other in pids:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"a rank of {size} ended with {status} in {act.__name__}")


def run(
    folder: Path, act: Callable[[Path, str], None], size: int, rank: int, names: list[str]
) -> None:
    """Be a rank; does not return."""
    code = 1
    try:
        store = FileStore(str(folder / f"store-{act.__name__}-{size}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        for name in names:
            act(folder, name)
        dist.barrier()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may go on in a fork
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path, *names: str) -> None:
    logging.disable(logging.WARNING)  # of slow collectives
    torch.set_num_threads(1)  # a fork has no pool of threads
    for act in (save, load):
        for size in sorted(set(map(world, names))):
            ranks(folder, act, size, [name for name in names if world(name) == size])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

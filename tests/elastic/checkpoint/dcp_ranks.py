"""A rank of the tests of DCP: `dcp_ranks.py FOLDER RANK WORLD`. It loads `one`, which one rank wrote, and
writes `ours` and `theirs`, the same by torch's own writer."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elastic.checkpoint.dcp import StorageReader, StorageWriter

warnings.simplefilter("ignore")


def trained(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after two steps, the same in every world; of sizes that no world divides."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    if sharded:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.full((2, 5), float(seed + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state(seed: int, *, sharded: bool) -> dict[str, Any]:
    model, optimizer = trained(seed, sharded=sharded)
    weights, moments = get_state_dict(model, optimizer)
    return {
        "model": weights,
        "optimizer": moments,
        "step": seed,
        "seen": {"epochs": (seed, seed + 1), "names": ["a", {"b": seed}]},
    }


def mesh_state(world: int) -> dict[str, Any]:
    """DTensors of each placement, uneven, empty on a rank, 0-d, bfloat16."""
    mesh = init_device_mesh("cpu", (world,))
    rows = torch.arange(15.0).view(3, 5)
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "columns": distribute_tensor(rows * 2, mesh, [Shard(1)]),
        "copies": distribute_tensor(rows * 3, mesh, [Replicate()]),
        "short": distribute_tensor(torch.ones(1, dtype=torch.bfloat16), mesh, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(7.5), mesh, [Replicate()]),
    }


def whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return tree.full_tensor() if isinstance(tree, DTensor) else tree


def same(left: Any, right: Any) -> bool:
    """Equal, bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    return bool(left == right)


def main(folder: Path, rank: int, world: int) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    found = state(1, sharded=True)
    load(found, storage_reader=StorageReader(folder / "one"))
    everything = state(3, sharded=True)
    right = same(whole(found), whole(everything))
    (folder / f"loaded-{rank}").write_text("same" if right else f"{whole(found)}")
    everything |= mesh_state(world)
    save(everything, storage_writer=StorageWriter(folder / "ours", 10))
    save(everything, storage_writer=FileSystemWriter(folder / "theirs"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

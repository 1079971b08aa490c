"""The processes that train together: who I am among them and which device is mine."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Its defaults hold for ever whatever group there is when it is imported, as DDP does late: gloo's
# threads then outlive the group, and may abort the process at its exit.
import torch.distributed.nn
from torch._C._distributed_c10d import HashStore

from elastic.proto.env import process_environment


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This rank's place, as the launcher gave it."""

    rank: int
    """Global number of this process, 0..size-1."""
    size: int
    """Number of processes."""
    device: torch.device
    """Where this rank computes."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0


@contextmanager
def joined() -> Iterator[World]:
    """Join the process group that torchrun's variables describe; a world of one without them.

    NCCL with CUDA, else gloo. The group is left in order only after a normal end: when something
    was raised a peer may be gone, and leaving would wait for it.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))
        torch.cuda.set_device(device)
        _join("nccl", device)
    else:
        device = torch.device("cpu")
        _join("gloo", None)
    yield World(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    # A model that is garbage still holds the group: gloo's threads would be there while Python ends.
    gc.collect()
    dist.destroy_process_group()


def _join(backend: str, device_id: torch.device | None) -> None:
    # Without any RANK this is `python -m`, with no launcher. One that is set beside others that
    # are missing is a mistake, which torch reports, and must not pass for a world of one.
    if "RANK" in process_environment():
        dist.init_process_group(backend, device_id=device_id)
    else:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device_id)

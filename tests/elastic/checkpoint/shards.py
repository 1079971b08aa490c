"""Checkpoints on any storage, without a job that saves them."""

import torch

from elastic.checkpoint.memory import copy_cpu
from elastic.checkpoint.state.image import Piece, header_bytes, lay_out, parse
from elastic.checkpoint.storage.protocol import Storage
from elastic.proto import manifest, sums

JOB = "j" * 32


def image(rank: int, world_size: int, numbers: int, *, whole: bool = False) -> bytes:
    """A rank's file: its part of the tensor `w`, or all of it."""
    shape = (numbers * world_size,)
    offset, extent = ((0,), shape) if whole else ((numbers * rank,), (numbers,))
    piece = Piece(name="w", dtype="float32", shape=shape, offset=offset, extent=extent)
    values = b'{"w":{"$tensor":"w"}}'
    laid = lay_out([piece], {}, len(values))
    out = bytearray(laid.nbytes)
    tensors = {"w": torch.full(extent, 0.0 if whole else float(rank))}
    out[laid.sums_at :] = sums.pack(copy_cpu.write(laid, tensors, values, memoryview(out)))
    return bytes(out)


def commit(
    storage: Storage,
    step: int,
    *,
    sequence: int = 1,
    round_: int = 1,
    world_size: int = 2,
    numbers: int = 3,
    whole: bool = False,
    value: float | None = None,
    job: str = JOB,
) -> manifest.Manifest:
    """A step with all that belongs to it. whole: each rank has all of the tensor."""
    shards: list[manifest.Shard] = []
    for rank in range(world_size):
        data = image(rank, world_size, numbers, whole=whole)
        name = manifest.file(rank, world_size, round_, job)
        storage.write(step, name, [memoryview(data)], len(data))
        table = data[parse(data[: header_bytes(data)], len(data)).sums_at :]
        shards.append(
            manifest.Shard(rank=rank, file=name, bytes=len(data), digest=sums.checksum(table))
        )
    made = manifest.Manifest(
        job=job, sequence=sequence, round=round_, step=step, world_size=world_size, value=value,
        shards=tuple(shards),
    )  # fmt: skip
    storage.publish(step, manifest.NAME, manifest.dumps(made).encode(), over=True)
    return made

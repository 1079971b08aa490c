"""The first weights: a function of (seed, name), whatever ranks hold which part of them."""

import hashlib
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.tensor_parallel import local

ROWS = 256
"""Rows that are drawn from a generator of their own: a rank draws those that it has a part of."""


def initialize(model: nn.Module, config: GPTConfig, seed: int, std: float) -> None:
    """Set every parameter in place; `std` is the matrices' deviation.

    Matrices that write to the residual stream have std / sqrt(2 L), so that its variance does not grow
    with depth (GPT-2). Norms are identity, biases 0.
    """
    residual = std / (2 * config.num_layers) ** 0.5
    with torch.no_grad(), ThreadPoolExecutor() as threads:
        for name, parameter in model.named_parameters():
            if config.tied and name == "head.weight":  # of a stage without the embedding
                name = "embedding.words.weight"
            own = local(parameter)
            if name.endswith(".bias"):
                own.zero_()
            elif parameter.dim() == 1:
                own.fill_(1.0)
            else:
                scale = residual if name.endswith(".output.weight") else std
                own.copy_(_drawn(parameter, seed, name, threads) * scale)


def _drawn(parameter: Tensor, seed: int, name: str, threads: Executor) -> Tensor:
    """This rank's part of the normal numbers of `name`."""
    shape, offset = tuple(parameter.shape), (0,) * parameter.dim()
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    if 0 in shape:
        return torch.empty(shape)
    first, last = offset[0], offset[0] + shape[0]
    numbers = range(first // ROWS, (last - 1) // ROWS + 1)
    blocks = threads.map(partial(_block, parameter.shape, seed, name), numbers)
    start = first - first // ROWS * ROWS
    rows = torch.cat(list(blocks))[start : start + shape[0]]
    return rows[:, offset[1] : offset[1] + shape[1]]


def _block(shape: torch.Size, seed: int, name: str, number: int) -> Tensor:
    # Always drawn on the CPU in fp32: a GPU's generator gives other numbers.
    digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    rows = min(ROWS, shape[0] - number * ROWS)
    return torch.randn((rows, shape[1]), generator=generator, dtype=torch.float32)

"""The first weights: a function of (seed, name), whatever ranks hold which part of them."""

import hashlib
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from elastic.proto.errors import UsageError
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.tensor_parallel import local

ROWS = 256
"""Rows that are drawn from a generator of their own: a rank draws those that it has a part of."""


def initialize(model: nn.Module, config: GPTConfig, seed: int, std: float) -> None:
    """Set every parameter in place; `std` is the matrices' deviation.

    Matrices that write to the residual stream have std / sqrt(2 L), so that its variance does not grow
    with depth (GPT-2). Norms are identity, biases 0. Modules that are not GPT's own may set theirs by
    `reset_parameters`, as torch's do. UsageError for a parameter of which nobody knows what it begins with.
    """
    residual = std / (2 * config.num_layers) ** 0.5
    _check(model)
    begun: dict[str, dict[str, Tensor]] = {}
    """By the module that was set last: a module's parameters come one after the other."""
    with torch.no_grad(), ThreadPoolExecutor() as threads:
        for name, parameter in model.named_parameters():
            place, _, last = name.rpartition(".")
            module, own = model.get_submodule(place), local(parameter)
            if config.tied and name == "head.weight":  # of a stage without the embedding
                name = "embedding.words.weight"
            if hasattr(module, "reset_parameters"):
                if place not in begun:
                    begun = {place: _reset(module, seed, place)}
                own.copy_(begun[place][last][_slices(parameter)])
            elif last.endswith("bias"):
                own.zero_()
            elif parameter.dim() == 2:
                scale = residual if name.endswith(".output.weight") else std
                own.copy_(_drawn(parameter, seed, name, threads) * scale)
            elif parameter.dim() == 1 and last == "weight":
                own.fill_(1.0)
            else:
                raise UsageError(
                    f"nobody knows what the parameter {name} begins with, since models are made without memory: give its "
                    "module a `reset_parameters()` that sets it"
                )


def _check(model: nn.Module) -> None:
    """Only a module's own parameters are set by it, whole and wherever they are shared out."""
    for name, module in model.named_modules():
        below = (one for child in module.children() for one in child.parameters())
        if hasattr(module, "reset_parameters") and any(True for _ in below):
            raise UsageError(
                f"{name or 'the model'} has a reset_parameters() and modules below it, whose parameters it cannot set: give each "
                "module its own"
            )


def _reset(module: Any, seed: int, name: str) -> dict[str, Tensor]:
    """Whole parameters of the module itself, as it sets them; its random numbers follow from `seed` and `name`."""
    kept = module._parameters
    module._parameters = {
        key: None if one is None else nn.Parameter(torch.empty(one.shape))
        for key, one in kept.items()
    }
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_number(seed, name))
            module.reset_parameters()
        return module._parameters  # type: ignore[no-any-return]
    finally:
        module._parameters = kept


def _slices(parameter: Tensor) -> tuple[slice, ...]:
    """This rank's part of it."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def _drawn(parameter: Tensor, seed: int, name: str, threads: Executor) -> Tensor:
    """This rank's part of the normal numbers of `name`."""
    mine, columns = _slices(parameter)
    if mine.start == mine.stop or columns.start == columns.stop:
        return torch.empty(mine.stop - mine.start, columns.stop - columns.start)
    numbers = range(mine.start // ROWS, (mine.stop - 1) // ROWS + 1)
    blocks = threads.map(partial(_block, parameter.shape, seed, name), numbers)
    before = numbers.start * ROWS
    return torch.cat(list(blocks))[mine.start - before : mine.stop - before, columns]


def _block(shape: torch.Size, seed: int, name: str, number: int) -> Tensor:
    # Always drawn on the CPU in fp32: a GPU's generator gives other numbers.
    generator = torch.Generator().manual_seed(_number(seed, f"{name}/{number}"))
    rows = min(ROWS, shape[0] - number * ROWS)
    return torch.randn((rows, shape[1]), generator=generator, dtype=torch.float32)


def _number(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

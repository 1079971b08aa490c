"""What a job fixes of its kernels, so that they end with the same bits in every process and every world."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from elastic.proto.errors import UsageError


def deterministic(device: torch.device) -> None:
    """From now on this process has kernels only that end with the same bits each time; at its start."""
    if device.type == "cuda":
        # cuBLAS takes workspaces by stream otherwise; it reads this itself.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # noqa: TID251
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    # Inductor would choose some of a reduction's parameters by timing them.
    torch._inductor.config.deterministic = True


@contextmanager
def kept() -> Iterator[None]:
    """What `deterministic` switches for the process is as it was, afterwards."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    fill, benchmark = filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    compiler = torch._inductor.config
    with compiler.patch(deterministic=compiler.deterministic):  # which torch's switch turns, too
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            filling.fill_uninitialized_memory = fill
            torch.backends.cudnn.benchmark = benchmark


def ring() -> None:
    """From now on NCCL adds up along rings only, as exact mode wants it where ranks share layers: NVLS ends with
    other bits from one call to the next, a tree's order follows the world. Before the process group is joined,
    since NCCL reads it once. Raises `UsageError` where the environment asks for something else."""
    asked = os.environ.setdefault("NCCL_ALGO", "Ring")  # noqa: TID251 - NCCL reads it nowhere else
    if asked.lower() != "ring":
        raise UsageError(
            f"NCCL_ALGO={asked} may add up in another order each time, which --reduction exact with "
            "--tensor-model-parallel-size above 1 forbids: unset it"
        )


def compile_each(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Each block by itself and in place, before FSDP is applied to it: names stay, and blocks of one shape
    have one graph between them. And the loss, where the model has one to compile."""
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False)
    for part in model.modules():
        if compile_loss := getattr(part, "compile_loss", None):
            compile_loss()

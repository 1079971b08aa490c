"""Causal attention on one GPU by each kernel, free and held to one order: `python -m benchmarks.attention [SHAPE ...]`.

Milliseconds of a layer's forward and backward; TFLOP/s of what lies below the diagonal. A kernel that is held
runs twenty times, and "same" says that its gradients had the same bits each time.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.head import BF16, milliseconds
from benchmarks.mfu import SHAPES, Shape
from elastic.trainer.model import attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FUSED = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


def fused(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def flex(length: int) -> Attend:
    """torch's own, by Inductor, as the trainer calls it: its backward adds nothing up in an order that varies."""
    attention.set_mask(length, torch.device("cuda"))
    return torch.compile(attention.causal, fullgraph=True, dynamic=False)


def kernels(length: int) -> dict[str, Attend]:
    found: dict[str, Attend] = {name: partial(fused, which) for name, which in FUSED.items()}
    return found | {"flex": flex(length)}


def inputs(shape: Shape) -> list[Tensor]:
    """Query, key and value as a layer's one product gives them: [B, A, S, D] of [B, S, A, 3, D]."""
    size = (shape.micro, shape.seq, shape.heads, 3, shape.hidden // shape.heads)
    drawn = torch.randn(size, device="cuda", dtype=BF16).permute(3, 0, 2, 1, 4)
    return [part.detach().requires_grad_() for part in drawn.unbind()]


def both(attend: Attend, parts: list[Tensor], gradient: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(attend(*parts), parts, gradient))


def same(attend: Attend, parts: list[Tensor], gradient: Tensor) -> bool:
    first = both(attend, parts, gradient)
    return all(
        torch.equal(one, other)
        for _ in range(20)
        for one, other in zip(first, both(attend, parts, gradient), strict=True)
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("names", nargs="*", default=["125m", "1.3b"])
    for name in parser.parse_args().names:
        shape = SHAPES[name]
        parts, flops = inputs(shape), 7 * shape.micro * shape.seq**2 * shape.hidden
        gradient = torch.randn_like(parts[0])
        for held in (False, True):
            torch.use_deterministic_algorithms(held)
            for kernel, attend in kernels(shape.seq).items():
                try:
                    spent = milliseconds(partial(both, attend, parts, gradient))
                    bits = ("same" if same(attend, parts, gradient) else "other bits") if held else ""  # fmt: skip
                except RuntimeError as error:
                    print(f"{name} {kernel}: {str(error).splitlines()[0]}", flush=True)
                    continue
                what = f"{name} {kernel}{' held' if held else ''}"
                print(f"{what:<26} {spent:7.3f} ms {flops / spent / 1e9:6.0f} TFLOP/s {bits}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

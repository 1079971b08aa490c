"""Causal attention, and which kernel computes it: one for the whole job, chosen and tried at start.

torch would choose for every call, and fall back to the unfused one without a word. `use` leaves it one
choice; the fused kernels of a job cannot change behind its back.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
    cudnn_sdp_enabled,
    enable_cudnn_sdp,
    enable_flash_sdp,
    enable_math_sdp,
    enable_mem_efficient_sdp,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from elastic.proto.errors import UsageError
from elastic.trainer.model.config import GPTConfig

Kernel = Literal["flash", "cudnn", "efficient", "math", "flex"]
"""flex is torch's FlexAttention, compiled with its block: its backward adds up in one order only, and is faster
than flash's is when that is held to one (`benchmarks.attention`)."""

_CAN_USE: Mapping[Kernel, Callable[[SDPAParams, bool], bool]] = {
    "flash": can_use_flash_attention,
    "cudnn": can_use_cudnn_attention,
    "efficient": can_use_efficient_attention,
}
_SWITCHES: Mapping[Kernel, tuple[Callable[[], bool], Callable[[bool], object]]] = {
    "flash": (flash_sdp_enabled, enable_flash_sdp),
    "cudnn": (cudnn_sdp_enabled, enable_cudnn_sdp),
    "efficient": (mem_efficient_sdp_enabled, enable_mem_efficient_sdp),
    "math": (math_sdp_enabled, enable_math_sdp),
}
"""torch's, which hold for the process, compiled code included: how one stands, and what turns it."""
_SPARSE = 128
"""Positions of a block of flex's mask."""
_mask: BlockMask | None = None
"""Of this process, where it computes with flex."""


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each position sees itself and those before it: [B, a, S, D], [B, g, S, D] twice -> [B, a, S, D]."""
    grouped = query.shape[1] != key.shape[1]
    if _mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return flex_attention(
        query,
        key,
        value,
        block_mask=_mask,
        enable_gqa=grouped,
        kernel_options=_tiles(query.shape[3]),
    )


def use(
    kernel: Kernel | None,
    config: GPTConfig,
    *,
    leaf_size: int,
    tp: int,
    dtype: torch.dtype,
    device: torch.device,
    exact: bool,
    compiled: bool,
) -> Kernel:
    """From now on this process computes attention with `kernel`, which is returned.

    None: the first of cuDNN's (or flex, if `exact`), flash and efficient that takes this shape. Raises
    `UsageError` where it does not take the shape or dtype.
    """
    choices: tuple[Kernel, ...] = (
        ("flex", "flash", "efficient") if exact else ("cudnn", "flash", "efficient")
    )
    choices = choices if kernel is None else (kernel,)
    reasons: dict[Kernel, str] = {}
    for choice in choices:
        _leave_only(choice)  # else torch refuses what an earlier choice has switched off
        reasons[choice] = _against(choice, config, leaf_size, tp, dtype, device, compiled=compiled)
        if not reasons[choice]:
            set_mask(config.seq_length if choice == "flex" else 0, device)
            return choice
    said = "; ".join(f"{choice}: {reason}" for choice, reason in reasons.items())
    raise UsageError(
        f"no fused attention takes {config.head_width} channels a head in {dtype} on {device.type} "
        f"({said}): take another --attention-backend, bf16, or --attention-backend unfused"
    )


@contextmanager
def kept() -> Iterator[None]:
    """What `use` has chosen for the process is as it was, afterwards."""
    global _mask
    mask, stood = _mask, {name: stands() for name, (stands, _) in _SWITCHES.items()}
    try:
        yield
    finally:
        _mask = mask
        for name, (_, switch) in _SWITCHES.items():
            switch(stood[name])


def _against(
    kernel: Kernel,
    config: GPTConfig,
    leaf_size: int,
    tp: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    compiled: bool,
) -> str:
    """Why it cannot be taken, or nothing."""
    if kernel == "math":
        return ""
    if kernel == "flex":
        return _against_flex(config, dtype, device, compiled=compiled)
    if device.type == "cpu":  # which has one of its own, for all shapes and dtypes
        return "" if kernel == "flash" else "there is none for CPUs"

    def made(heads: int) -> torch.Tensor:
        return torch.empty(
            leaf_size, heads // tp, config.seq_length, config.head_width,
            dtype=dtype, device=device, requires_grad=True,
        )  # fmt: skip

    heads, groups = config.num_attention_heads, config.groups
    wanted = SDPAParams(made(heads), made(groups), made(groups), None, 0.0, True, heads != groups)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if _CAN_USE[kernel](wanted, True):
            return ""
    return str(told[-1].message).split(" (Triggered")[0] if told else "torch warned above of why"


def _against_flex(
    config: GPTConfig, dtype: torch.dtype, device: torch.device, *, compiled: bool
) -> str:
    """As `_against`."""
    width = config.head_width
    if device.type == "cpu":
        return "it has no backward on CPUs"
    if not compiled:
        return "it is slow without --compile"
    if dtype == torch.float32:
        return "it is slow in fp32"
    if config.seq_length % _SPARSE or width not in (16, 32, 64, 128):
        return (
            f"it wants positions in multiples of {_SPARSE}, and 16, 32, 64 or 128 channels a head"
        )
    return ""


def set_mask(length: int, device: torch.device) -> None:
    """Of so many positions; 0: none."""
    global _mask
    _mask = None
    if length:
        _mask = create_block_mask(_is_seen, None, None, length, length, device=device.type)


def _is_seen(_: Tensor, __: Tensor, asking: Tensor, asked: Tensor) -> Tensor:
    return asking >= asked


def _tiles(width: int) -> Any:  # keys that torch takes, but does not type
    """Sizes that are fastest on an H200 for heads of `width` channels (`benchmarks.attention`)."""
    tiles = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3}
    if width <= 64:
        tiles |= {
            "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
            "bwd_num_warps": 4, "bwd_num_stages": 3,
        }  # fmt: skip
    return tiles


def _leave_only(kernel: Kernel) -> None:
    assert _SWITCHES.keys() == set(get_args(Kernel)) - {"flex"}
    for name, (_, switch) in _SWITCHES.items():
        switch(name == kernel)

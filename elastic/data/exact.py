"""Sums of leaves' gradients, and norms, that no order and no grouping changes: the exact grid.

Each leaf's gradient is rounded to multiples of 2^e before it is added up in fp64. A tensor has a `top`,
with all its magnitudes at most 2^top, and a batch at most 2^k leaves; e = top + k - 53. Then

1. every rounded value is a whole number of 2^e, of at most 2^(53 - k) in magnitude;
2. so a sum of any of the at most 2^k leaves is a whole number of 2^e, of at most 2^53;
3. fp64 holds every such number, so no addition rounds, in whatever order, grouping or tree.

The top of a step is the largest magnitude of the step before, over all leaves and ranks (a max, on
which all agree), with `HEADROOM` bits more. A step in which a leaf goes beyond (`fits`) is done again
with the tops of its own magnitudes, before the optimizer has changed anything: whatever the world,
all see the same maximum and do the same. So does the first step, of whose gradients nothing is known.
Tops belong to the state that is saved: with others a resumed run would round otherwise.

A sum is off by at most (leaves) x 2^(e - 1) from that of the unrounded gradients: with 2^k leaves,
2^(2k + HEADROOM - 53) of the step before's largest magnitude; 1.2e-10 for 32 leaves. Each bit less of
headroom halves that. Values of 2^(e + 23) and above (bf16: 2^(e + 7)) are not changed at all.

What is no number stays none: its `largest` is inf, it fits, it leaves the tops alone, and the sum is
inf or NaN in every order. Zeros, and what rounds to zero, are +0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

HEADROOM = 10
"""Bits by which magnitudes may grow from one step to the next."""
UNKNOWN = -200
"""The top of a tensor before its first step: nothing but zeros fits. (fp32 goes down to 2^-149.)"""
LIMBS = 3
"""Numbers that hold one sum of squares."""

_MANTISSA = 53
_FEWEST = 2


def largest(gradient: Tensor) -> Tensor:
    """Largest magnitude, fp32 [], to be agreed on by a max; inf where not all is finite."""
    if gradient.numel() == 0:
        return gradient.new_zeros((), dtype=torch.float32)
    return _finite(torch.linalg.vector_norm(gradient.detach(), torch.inf, dtype=torch.float32))


def largest_of_each(gradients: Sequence[Tensor]) -> Tensor:
    """`largest` of every one of them, fp32 [T], by few kernels; none of them may be empty."""
    norms = torch._foreach_norm([one.detach() for one in gradients], torch.inf)
    return _finite(torch.stack(norms).float())


def unknown_tops(tensors: int, device: torch.device | str = "cpu") -> Tensor:
    """The tops of tensors before their first step, int64 [T]."""
    return torch.full((tensors,), UNKNOWN, dtype=torch.int64, device=device)


def fits(magnitudes: Tensor, tops: Tensor) -> Tensor:
    """Which sums are exact, bool [T]: where one is not, the step is to be done again.

    magnitudes: `largest` of each tensor, over all leaves and ranks, [T]; tops: those of the step. Done
    again with `next_tops(magnitudes, tops)`, it fits.
    """
    return (magnitudes.double() <= _power(tops)) | magnitudes.isinf()


def next_tops(magnitudes: Tensor, tops: Tensor, headroom: int = HEADROOM) -> Tensor:
    """The tops of the step after one with these `magnitudes` and `tops`, int64 [T].

    A tensor of zeros, and one that was not finite, keeps its top.
    """
    wide = magnitudes.double()
    exponents = (
        wide.view(torch.int64) >> 52
    ) - 1022  # magnitude < 2^exponent; fp32's all are normal
    known = (magnitudes > 0) & magnitudes.isfinite()
    return torch.where(known, exponents + headroom, tops)


def offsets(tops: Tensor, leaves: int) -> Tensor:
    """What `rounded` takes for each tensor, fp64 [T]; leaves: the most that a batch has."""
    return _offset(tops + _bits(leaves) - _MANTISSA)


def rounded(gradient: Tensor, offset: Tensor) -> Tensor:
    """The gradient on its grid, in its own dtype: bf16, fp16 or fp32. Sum these in fp64.

    offset: the tensor's own of `offsets`, [].
    """
    # Multiples of 2^e need no more bits than what they were rounded from: the way back is exact.
    return _on_grid(gradient.double(), offset).to(gradient.dtype)


def square_exponents(tops: Tensor, numels: Tensor) -> Tensor:
    """What `squares` takes for each tensor, int64 [T, LIMBS].

    tops: all of the tensor is at most 2^top in magnitude, int64 [T], as `next_tops(..., headroom=0)` has
    it from the `largest` of all parts; numels: elements of the whole tensors, int64 [T].
    """
    bits = ((numels - 1).double().view(torch.int64) >> 52) - 1022  # as `_bits` has them
    widths = bits.clamp(min=_FEWEST) - _MANTISSA
    limb = torch.arange(LIMBS, device=tops.device)
    # What is left after a limb is half a step of its grid at most.
    return (2 * tops + widths).unsqueeze(1) + limb * (widths.unsqueeze(1) - 1)


def squares(parts: Tensor, exponents: Tensor) -> Tensor:
    """The sums of squares of parts of tensors, [..., n] -> fp64 [..., LIMBS]: a tensor's limbs add up exactly
    in any order.

    exponents: each tensor's own of `square_exponents`, [..., LIMBS].

    Each limb holds the next bits of every square, as whole numbers of a power of two that have room
    for all elements of the tensor: the proof is that of the module. What is below the last limb is lost:
    for n elements less than n^4 2^-160 of the whole, which is less than 2^-40 up to 2^30 elements.
    """
    rest = parts.detach().double().square()
    limbs = []
    for exponent in exponents.unbind(-1):
        limb = _on_grid(rest, _offset(exponent).unsqueeze(-1))
        rest = rest - limb
        limbs.append(limb.sum(-1))
    return torch.stack(limbs, dim=-1)


def norm(limbs: Tensor) -> Tensor:
    """The norm of all tensors, fp32 [], from the limbs of each, [T, LIMBS]; NaN where not all is finite.

    The same for the same limbs in the same order of tensors, so give them by name, not by rank.
    """
    return limbs.sum().sqrt().float()


def _finite(magnitudes: Tensor) -> Tensor:
    """What is no number is the largest of all."""
    return torch.nan_to_num(magnitudes, nan=torch.inf, posinf=torch.inf)


def _on_grid(values: Tensor, offset: Tensor) -> Tensor:
    """fp64 values, rounded to even on the grid of `offset`; right up to 2^51 steps of it."""
    return (values + offset) - offset


def _offset(exponent: Tensor) -> Tensor:
    """A number whose neighbours, to both sides, are 2^exponent away, so that adding it rounds."""
    return 1.5 * _power(exponent + _MANTISSA - 1)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, for -1022 to 1023. Of bits: `pow` of a device may be off by one."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _bits(count: int) -> int:
    """So that `count` is at most 2^bits; at least 2, which keeps sums within the reach of `_on_grid`."""
    return max(_FEWEST, (count - 1).bit_length())

"""A kernel of Triton's that writes where it may not."""

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit
def far(values, offset):  # type: ignore[no-untyped-def]
    tl.store(values + offset, 1.0)

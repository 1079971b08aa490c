"""One attention kernel for a job: chosen at start, or refused in one line."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from elastic.proto.errors import UsageError
from elastic.trainer.model import attention
from elastic.trainer.model.attention import Kernel
from tests.trainer.model.shapes import GPT2

SWITCHES: dict[str, tuple[Any, Any]] = {
    "flash": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "cudnn": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    "efficient": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "math": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
}


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    """They are the process's: other tests find them as they were."""
    before = {name: enabled() for name, (enabled, _) in SWITCHES.items()}
    yield
    for name, (_, switch) in SWITCHES.items():
        switch(before[name])
    attention.set_mask(0, torch.device("cpu"))


def use(
    kernel: Kernel | None,
    *,
    exact: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    width: int = 8,
    length: int = 128,
    compiled: bool = True,
) -> Kernel:
    return attention.use(
        kernel, replace(GPT2, kv_channels=width, seq_length=length), leaf_size=2, tp=2, dtype=dtype,
        device=torch.device(device), exact=exact, compiled=compiled,
    )  # fmt: skip


@pytest.mark.parametrize("kernel", [None, "flash", "math"])
def test_from_then_on_there_is_one(kernel: Kernel | None) -> None:
    chosen = use(kernel)
    assert chosen == (kernel or "flash")
    assert [name for name, (enabled, _) in SWITCHES.items() if enabled()] == [chosen]


def test_what_a_device_does_not_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"efficient: there is none for CPUs.*attention-backend"):
        use("efficient")
    with pytest.raises(UsageError, match=r"flex: it has no backward on CPUs.*attention-backend"):
        use("flex")


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"compiled": False}, "slow without --compile"),
        ({"dtype": torch.float32}, "slow in fp32"),
        ({"length": 192}, "in multiples of 128"),
        ({"width": 96}, "16, 32, 64 or 128 channels"),
    ],
)
def test_what_flex_is_not_fast_with_is_refused(told: dict[str, Any], reason: str) -> None:
    fitting: dict[str, Any] = {"dtype": torch.bfloat16, "width": 64}
    with pytest.raises(UsageError, match=f"flex: .*{reason}"):
        use("flex", device="cuda", **fitting | told)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_flex_sees_what_the_others_see(groups: int) -> None:
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 256, 16, generator=draw)
    key, value = (torch.randn(2, groups, 256, 16, generator=draw) for _ in range(2))
    wanted = attention.causal(query, key, value)
    attention.set_mask(256, torch.device("cpu"))
    # As a part of a block is: whole, with the mask as a constant. On CPUs Inductor has no backward for it.
    traced = torch.compile(attention.causal, fullgraph=True, dynamic=False, backend="aot_eager")
    found = traced(query, key, value)
    torch.testing.assert_close(found, wanted)
    assert not torch.equal(found, wanted), "one kernel was called for both"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("exact", "compiled", "kernel"),
    [(False, True, "cudnn"), (True, True, "flex"), (True, False, "flash")],
)
def test_on_a_gpu_bf16_gets_cudnns_or_in_exact_mode_what_can_be_held(
    exact: bool, compiled: bool, kernel: Kernel
) -> None:
    found = use(None, exact=exact, compiled=compiled, device="cuda", dtype=torch.bfloat16, width=64)
    assert found == kernel


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_that_does_not_take_the_dtype_is_refused_and_says_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UsageError, match="flash: ") as refused:
        use("flash", device="cuda", width=64)
    warned = capfd.readouterr().err if "warned above" in str(refused.value) else ""  # torch 2.11
    assert re.search("Half|dtype", str(refused.value).split("flash: ")[1] + warned)


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_is_asked_for_after_another() -> None:
    assert use("cudnn", device="cuda", dtype=torch.bfloat16, width=64) == "cudnn"
    assert use("flash", device="cuda", dtype=torch.bfloat16, width=64) == "flash"

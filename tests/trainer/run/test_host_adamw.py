"""Moments in host memory change no bit of a step, and come from and go into the same checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.checkpoint import Checkpointer
from elastic.trainer.run import host_adamw
from elastic.trainer.run.host_adamw import HostAdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(device: str = "cpu") -> list[torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    shapes = [(33, 16), (7,), (), (0, 4)]
    return [torch.nn.Parameter(torch.randn(s, generator=drawn).to(device)) for s in shapes]


def groups(held: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": held[:1], "weight_decay": 0.1}, {"params": held[1:], "weight_decay": 0.0}]


def run(optimizer: torch.optim.Optimizer, held: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        drawn = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(held):
            gradient = torch.randn(parameter.shape, generator=drawn).to(parameter.device)
            parameter.grad = None if number == 1 and step == 1 else gradient
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()


def same_bits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_adamw, "PIECE", 128)
    ours, torchs = parameters(device), parameters(device)
    run(mine := HostAdamW(groups(ours), **OPTIONS), ours, range(5))
    run(
        its := torch.optim.AdamW(groups(torchs), fused=device == "cuda", **OPTIONS),
        torchs,
        range(5),
    )
    for one, other in zip(ours, torchs, strict=True):
        assert torch.equal(one, other)
        assert mine.state[one].keys() == its.state[other].keys()
        for name, value in mine.state[one].items():
            assert value.device.type == "cpu"
            assert torch.equal(value, its.state[other][name].cpu()), name


def test_a_step_is_that_of_torchs_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits("cpu", monkeypatch)


@pytest.mark.gpu
def test_on_a_gpu_it_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits("cuda", monkeypatch)


@pytest.mark.gpu
def test_on_a_gpu_moments_are_pinned_and_few_are_there_at_a_time() -> None:
    large = torch.nn.Parameter(torch.zeros(8 * host_adamw.PIECE, device="cuda"))
    optimizer = HostAdamW([large], **OPTIONS)
    assert optimizer.state[large]["exp_avg"].is_pinned()
    large.grad = torch.ones_like(large)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    optimizer.step()
    moments = 2 * 4 * host_adamw.PIECE
    assert torch.cuda.max_memory_allocated() - before <= 3 * moments + 2**20


def test_it_goes_on_from_a_checkpoint_of_torchs_in_place_and_back(tmp_path: Path) -> None:
    first, second = parameters(), parameters()
    plain = torch.optim.AdamW(groups(first), fused=True, **OPTIONS)
    run(plain, first, range(3))
    with Checkpointer(tmp_path, persist_every=1) as checkpoint:
        checkpoint.save(3, {"optimizer": plain, "parameters": first})
    hosted = HostAdamW(groups(second), **OPTIONS)
    with Checkpointer(tmp_path, persist_every=1) as checkpoint:
        held = [hosted.state[p]["exp_avg"] for p in second]
        assert checkpoint.load({"optimizer": hosted, "parameters": second}) == 3
        assert all(hosted.state[p]["exp_avg"] is h for p, h in zip(second, held, strict=True))
    run(plain, first, range(3, 5))
    run(hosted, second, range(3, 5))
    third = parameters()
    with Checkpointer(tmp_path, persist_every=1) as checkpoint:
        checkpoint.save(5, {"optimizer": hosted, "parameters": second})
        again = torch.optim.AdamW(groups(third), fused=True, **OPTIONS)
        assert checkpoint.load({"optimizer": again, "parameters": third}) == 5
    run(plain, first, range(5, 7))
    run(again, third, range(5, 7))
    for one, other in zip(first, third, strict=True):
        assert torch.equal(one, other)

"""Moments in host memory change no bit of a step, and come from and go into the same checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.checkpoint import Checkpointer
from elastic.trainer.run import host_adamw
from elastic.trainer.run.host_adamw import HostAdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def parameters(device: str = "cpu", seed: int = 0) -> list[torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(seed)
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
    run(mine := HostAdamW(groups(ours), **OPTIONS), ours, range(20))
    run(
        its := torch.optim.AdamW(groups(torchs), fused=device == "cuda", **OPTIONS),
        torchs,
        range(20),
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


@pytest.mark.parametrize("seed", range(4))
def test_it_goes_on_from_a_checkpoint_of_torchs_in_place_and_back(
    tmp_path: Path, seed: int
) -> None:
    """Of torch's that is not fused, as ours is not on CPUs: the fused one ends with other bits, as a rule."""
    first, second = parameters(seed=seed), parameters(seed=seed)
    plain = torch.optim.AdamW(groups(first), fused=False, **OPTIONS)
    run(plain, first, range(10))
    with Checkpointer(tmp_path, persist_every=1) as checkpoint:
        checkpoint.save(10, {"optimizer": plain, "parameters": first})
    hosted = HostAdamW(groups(second), **OPTIONS)
    with Checkpointer(tmp_path, persist_every=1) as checkpoint:
        held = [hosted.state[p]["exp_avg"] for p in second]
        assert checkpoint.load({"optimizer": hosted, "parameters": second}) == 10
        assert all(hosted.state[p]["exp_avg"] is h for p, h in zip(second, held, strict=True))
    run(plain, first, range(10, 20))
    run(hosted, second, range(10, 20))
    assert_equal(first, second)
    third = parameters(seed=seed)
    with Checkpointer(tmp_path, persist_every=1) as checkpoint:
        checkpoint.save(20, {"optimizer": hosted, "parameters": second})
        again = torch.optim.AdamW(groups(third), fused=False, **OPTIONS)
        assert checkpoint.load({"optimizer": again, "parameters": third}) == 20
    run(plain, first, range(20, 30))
    run(again, third, range(20, 30))
    assert_equal(first, third)


def test_what_had_no_moments_when_it_was_saved_has_none_again() -> None:
    """As behind fp16 steps of torch's that all overflowed: a rollback to them is as a restart there."""
    held = parameters()
    hosted, plain = HostAdamW(groups(held), **OPTIONS), torch.optim.AdamW(groups(held), **OPTIONS)
    run(hosted, held, range(2))
    hosted.load_state_dict(plain.state_dict())
    for state in hosted.state.values():
        assert not any(value.any() for value in state.values())


def test_what_is_not_trained_has_no_moments_as_with_torchs() -> None:
    held = parameters()
    held[1].requires_grad_(False)
    hosted, plain = HostAdamW(groups(held), **OPTIONS), torch.optim.AdamW(groups(held), **OPTIONS)
    held[0].grad, held[2].grad, held[3].grad = (torch.ones_like(held[n]) for n in (0, 2, 3))
    hosted.step()
    plain.step()
    assert held[1] not in hosted.state
    assert hosted.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    hosted.load_state_dict(plain.state_dict())
    assert hosted.state_dict()["state"].keys() == plain.state_dict()["state"].keys()


def assert_equal(ours: list[torch.nn.Parameter], theirs: list[torch.nn.Parameter]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)

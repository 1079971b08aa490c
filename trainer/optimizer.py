"""AdamW, and the learning rate as a function of the step."""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up, then a half cosine down to `min_lr`, which stays."""

    lr: float
    """Peak learning rate."""
    min_lr: float
    """Learning rate at the end of the decay and after it."""
    warmup_steps: int
    """Steps until `lr` is reached; step 0 has lr / warmup_steps."""
    decay_steps: int
    """Step at which `min_lr` is reached, counted from 0 and warm-up included."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_lr <= self.lr:
            raise ValueError(f"min_lr {self.min_lr} is not between 0 and lr {self.lr}")
        if self.warmup_steps < 0 or self.decay_steps < 1:
            raise ValueError("warmup_steps must be at least 0 and decay_steps at least 1")

    def at(self, step: int) -> float:
        """Learning rate of the step, which counts from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if step >= self.decay_steps:
            return self.min_lr
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.min_lr + (self.lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def build(
    model: nn.Module, *, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """AdamW over all parameters; biases and norms, the one-dimensional ones, do not decay.

    The learning rate is 0 until `set_lr`.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr

"""The factor that keeps fp16's gradients from vanishing: Megatron's, step by step. Pure but for `LossScale`.

Losses are multiplied by it before backward, gradients divided by it before they are clipped and counted.
Where one of them has overflowed anywhere, all ranks leave the step out: what they go by is the norm of the
whole gradient, which is the same on all of them and not finite then.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

GROWTH = 2.0
"""What the scale is multiplied by after a window without overflow, and divided by after too many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Megatron's --initial-loss-scale, --min-loss-scale, --loss-scale-window and --hysteresis."""

    initial: float = 2.0**32
    """The first scale."""
    least: float = 1.0
    """It does not fall below."""
    window: int | None = 1000
    """Steps without overflow in a row until it grows; None: it stays as it is (--loss-scale)."""
    hysteresis: int = 2
    """Overflows until it falls; it falls with each one after that, until it has grown."""


class State(NamedTuple):
    """Between two steps."""

    scale: float
    """What the next step's losses are multiplied by."""
    clean: int
    """Steps without overflow since the last one, or since the scale has grown."""
    left: int
    """Overflows until the scale falls; 0 and below: each one."""


def first(policy: Policy) -> State:
    """Before the first step."""
    return State(policy.initial, 0, policy.hysteresis)


def after(state: State, policy: Policy, *, overflowed: bool) -> State:
    """After a step: whether it is left out is the same question as whether it overflowed."""
    if policy.window is None:
        return state
    if overflowed:
        left = state.left - 1
        scale = max(state.scale / GROWTH, policy.least) if left <= 0 else state.scale
        return State(scale, 0, left)
    if state.clean + 1 >= policy.window:  # which may have been another
        return State(state.scale * GROWTH, 0, policy.hysteresis)
    return state._replace(clean=state.clean + 1)


class LossScale:
    """That of a run; `state` is saved and loaded, in place."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.state = torch.tensor(first(policy), dtype=torch.float64)
        """A `State`, fp64 [3] on the CPU, the same on every rank."""
        self.stuck = 0
        """Steps in a row, the last one among them, that overflowed with a scale that cannot fall; of this life."""

    @property
    def value(self) -> float:
        """What the next step's losses are multiplied by, and its gradients divided by. One that stays as it
        is does so whatever state is loaded."""
        return self._policy.initial if self._policy.window is None else float(self.state[0])

    def update(self, norm: Tensor) -> bool:
        """After each step's backward; returns whether the optimizer may take the step.

        norm: of the whole gradient, [], the same on every rank; inf or NaN where anything overflowed.
        """
        fine = bool(norm.isfinite())
        fixed = self._policy.window is None
        hopeless = not fine and (fixed or self.value <= self._policy.least)
        self.stuck = self.stuck + 1 if hopeless else 0
        scale, clean, left = self.state.tolist()
        state = State(scale, int(clean), int(left))
        self.state.copy_(torch.tensor(after(state, self._policy, overflowed=not fine)))
        return fine

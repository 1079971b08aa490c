"""What is taken for a fault of training itself, and what is done then."""

from dataclasses import dataclass
from typing import Literal

from elastic.proto.errors import UsageError

LEAST = 16
"""Steps that medians want, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardFlags:
    """Guard against bad steps.

    Bounds are in robust deviations: 1.4826 times the median distance from the line of the window.
    """

    guard: Literal["off", "warn", "rollback"] = "off"
    """What to do about spikes and sudden falls of the loss, odd gradient norms, and NaN."""
    guard_window: int = 128
    """Steps that the next one is compared with."""
    guard_warmup: int = 100
    """Steps at the beginning in which only NaN and infinity count."""
    guard_spike: float = 8.0
    """Deviations that the loss may be above the line."""
    guard_fall: float = 8.0
    """Deviations that it may be below: data that was seen before falls suddenly."""
    guard_norm: float = 10.0
    """Deviations that the logarithm of the gradient's norm may be from its line."""
    guard_patience: int = 3
    """Steps in a row out of bounds until the run goes back; NaN and infinity are not waited for."""
    guard_rollbacks: int = 3
    """Times that it goes back within a window; then it stops, since it is not the data."""

    def __post_init__(self) -> None:
        for name in ("guard_window", "guard_warmup"):
            if getattr(self, name) < LEAST:
                raise UsageError(f"--{name.replace('_', '-')} is at least {LEAST} steps")
        for name in ("guard_spike", "guard_fall", "guard_norm"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--{name.replace('_', '-')} is above 0")
        if self.guard_patience < 1 or self.guard_rollbacks < 0:
            raise UsageError("--guard-patience is at least 1 and --guard-rollbacks at least 0")

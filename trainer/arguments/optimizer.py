"""Optimizer and precision, under Megatron's names. Pure."""

import math
from dataclasses import dataclass
from typing import Literal

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.options import flag_of
from elastic.trainer.run.loss_scale import Policy

Precision = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerFlags:
    """Optimizer and precision."""

    adam_beta1: float = 0.9
    """AdamW's average of gradients."""
    adam_beta2: float = 0.999
    """AdamW's average of their squares."""
    adam_eps: float = 1e-8
    """What AdamW adds to the root of the latter."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient; 0: as it is."""
    bf16: bool = False
    """Compute in bf16; parameters are kept in fp32."""
    fp16: bool = False
    """Compute in fp16, with a loss scale."""
    loss_scale: float | None = None
    """Of --fp16, constant; if not given dynamic."""
    initial_loss_scale: float = 2.0**32
    """Dynamic loss scale of the first step."""
    min_loss_scale: float = 1.0
    """Smallest dynamic loss scale."""
    loss_scale_window: int = 1000
    """Steps without an overflow until it is doubled."""
    hysteresis: int = 2
    """Overflows until it is halved."""

    def __post_init__(self) -> None:
        if self.bf16 and self.fp16:
            raise UsageError("--fp16 and --bf16: give one of them")
        if self.loss_scale is not None and not self.fp16:
            raise UsageError("--loss-scale wants --fp16: give both or none")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UsageError(
                    f"{flag_of(name)} is at least 0 and below 1, not {getattr(self, name)}"
                )
        for name in ("adam_eps", "loss_scale", "initial_loss_scale", "min_loss_scale"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{flag_of(name)} is above 0, not {getattr(self, name)}")
        if not self.clip_grad >= 0:
            raise UsageError(f"--clip-grad is at least 0, not {self.clip_grad}")
        if self.min_loss_scale > self.initial_loss_scale:
            raise UsageError("--min-loss-scale is above --initial-loss-scale: lower it")
        if min(self.loss_scale_window, self.hysteresis) < 1:
            raise UsageError("--loss-scale-window and --hysteresis are at least 1")

    def loss_scaling(self) -> Policy | None:
        """How the loss is scaled; None: not at all."""
        if not self.fp16:
            return None
        return Policy(
            initial=self.loss_scale or self.initial_loss_scale,
            least=self.min_loss_scale,
            window=None if self.loss_scale else self.loss_scale_window,
            hysteresis=self.hysteresis,
        )

    @property
    def precision(self) -> Precision:
        """What is computed in."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

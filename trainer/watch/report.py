"""What a step says, what the steps since the last log line come to, and names and values of both. Pure.

A step's numbers are the same on every rank, so any rank could log them; rank 0 does.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from elastic.trainer.watch.flops import Flops, utilization


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of the run."""

    iteration: int
    """Its number: steps that are finished with it."""
    consumed: int
    """Samples of all steps up to it; what nobody trains on does not count."""
    batch_size: int
    """Its samples."""
    learning_rate: float
    losses: Mapping[str, float]
    """Means over its tokens: `lm loss`, and what else the script's loss function names."""
    sources: Mapping[str, float] = field(default_factory=dict)
    """`lm loss` of each data source that had tokens in it."""
    grad_norm: float | None = None
    """Before clipping."""
    params_norm: float | None = None
    num_zeros: int | None = None
    """In the gradient."""
    loss_scale: float = 1.0
    world_size: int = 1
    skipped: bool = False
    """The optimizer left the weights as they were, since a gradient was not finite."""
    skipped_samples: int = 0
    """Samples of the run so far that nobody trains on, because the guard said so."""

    @property
    def finite(self) -> bool:
        return all(math.isfinite(loss) for loss in self.losses.values())


class Sum(NamedTuple):
    """Of a loss over steps that have it."""

    total: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The steps since the last log line."""

    advanced: int = 0
    skipped: int = 0
    nan: int = 0
    """Steps with a loss that is no number, or infinite."""
    losses: Mapping[str, Sum] = field(default_factory=dict)
    """Of steps that were not skipped."""
    sources: Mapping[str, Sum] = field(default_factory=dict)
    """The same, of each data source."""

    @property
    def steps(self) -> int:
        return self.advanced + self.skipped

    def add(self, step: Step) -> "Tally":
        nan = self.nan + (not step.finite)
        if step.skipped:
            return replace(self, skipped=self.skipped + 1, nan=nan)
        return Tally(
            advanced=self.advanced + 1,
            skipped=self.skipped,
            nan=nan,
            losses=_added(self.losses, step.losses),
            sources=_added(self.sources, step.sources),
        )

    def means(self) -> dict[str, float]:
        """Losses, each over the steps that had it and were not skipped; none where all were."""
        return _means(self.losses)

    def source_means(self) -> dict[str, float]:
        """Of each data source, over the steps in which it had tokens."""
        return _means(self.sources)


def _added(sums: Mapping[str, Sum], losses: Mapping[str, float]) -> dict[str, Sum]:
    added = dict(sums)
    for name, loss in losses.items():
        total, steps = added.get(name, Sum(0.0, 0))
        added[name] = Sum(total + loss, steps + 1)
    return added


def _means(sums: Mapping[str, Sum]) -> dict[str, float]:
    return {name: total / steps for name, (total, steps) in sums.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Of a step, on average since the last log line."""

    seconds: float
    """A step's."""
    tokens: float
    """A second, of all devices."""
    throughput: float
    """TFLOP a second and device, as Megatron counts."""
    mfu: float | None = None
    """6N + 12LHQT, 0 to 1."""
    mfu_matmul: float | None = None
    """Without what is only looked up."""
    mfu_causal: float | None = None
    """As Megatron counts: of attention the half under the diagonal."""

    @property
    def shares(self) -> dict[str, float]:
        """Those of a device's peak, by their names in the metrics; none where that is not known."""
        shares = {"mfu": self.mfu, "mfu_matmul": self.mfu_matmul, "mfu_causal": self.mfu_causal}
        return {name: share for name, share in shares.items() if share is not None}


def speed(
    seconds: float, steps: int, tokens: int, *, flops: Flops, devices: int, peak: float | None
) -> Speed:
    """Of `steps`, which had `tokens` in all and took `seconds`; peak: of a device, FLOP/s."""
    return Speed(
        seconds=seconds / steps,
        tokens=tokens / seconds,
        throughput=flops.megatron * tokens / (seconds * devices * 1e12),
        mfu=utilization(flops.palm, tokens, seconds, devices, peak),
        mfu_matmul=utilization(flops.matmul, tokens, seconds, devices, peak),
        mfu_causal=utilization(flops.megatron, tokens, seconds, devices, peak),
    )


def scalars(step: Step) -> dict[str, float]:
    """Megatron's TensorBoard tags of a step; each has a twin `... vs samples`. Row by row as there."""
    found: dict[str, float | None] = {
        "learning-rate": step.learning_rate,
        "skipped-train-samples": step.skipped_samples or None,
        "batch-size": step.batch_size,
        **step.losses,
        **{f"lm loss {source}": loss for source, loss in step.sources.items()},
        "loss-scale": step.loss_scale,
        "world-size": step.world_size,
        "grad-norm": step.grad_norm,
        "num-zeros": step.num_zeros,
        "params-norm": step.params_norm,
    }
    return {tag: value for tag, value in found.items() if value is not None}


def metrics(step: Step, tally: Tally, speed: Speed) -> dict[str, Any]:
    """What the JSON line of a logged step has; losses are means over the steps since the last one."""
    told = asdict(step) | {"losses": tally.means(), "sources": tally.source_means()}
    told |= {"steps": tally.steps, "skipped": tally.skipped, "nan": tally.nan}
    return told | {
        "seconds": speed.seconds,
        "tokens_per_second": speed.tokens,
        "tflops_per_device": speed.throughput,
        **speed.shares,
    }

"""Batch size, learning rate and weight decay: each a function of the samples consumed. Pure.

Nothing here counts steps or ranks, so neither a resize nor a ramp of the batch bends a curve. A step
uses what its place says: the samples consumed before it (0 for the first). The formulas are
Megatron's (its `OptimizerParamScheduler` and its calculators of micro-batches).
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self, get_args

from elastic.proto.errors import UsageError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WsdStyle = Literal["exponential", "linear", "cosine", "minus_sqrt"]
IncrementStyle = Literal["constant", "linear", "cosine"]

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """The global batch size of every step of a run. Made by `constant`, `ramp` or `stepwise`."""

    stages: tuple[tuple[int, int], ...]
    """(samples consumed from which on, samples of a batch), the first from 0, in rising order."""

    @classmethod
    def constant(cls, batch: int) -> Self:
        """The same for ever: `--global-batch-size`."""
        if batch < 1:
            raise UsageError(f"--global-batch-size is at least 1, not {batch}")
        return cls(stages=((0, batch),))

    @classmethod
    def ramp(cls, start: int, increment: int, samples: int, *, batch: int) -> Self:
        """`--rampup-batch-size START INCREMENT SAMPLES`: up to `batch` in equal parts of SAMPLES."""
        given = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 1:
            raise UsageError(f"{given}: all three are at least 1")
        if start >= batch:
            raise UsageError(
                f"{given} starts at --global-batch-size {batch} or above: start lower, or leave it out"
            )
        if (batch - start) % increment:
            raise UsageError(
                f"{given}: steps of {increment} from {start} do not meet --global-batch-size {batch}; "
                f"give an increment that divides {batch - start}"
            )
        increments = (batch - start) // increment
        width = samples / increments  # of a part; not whole, and rounded as Megatron rounds it
        stages = [(0, start)]
        for number in range(1, increments + 1):
            first = min(_reaches(number, number * samples // increments, width), samples + 1)
            if first == stages[-1][0]:
                stages.pop()  # more increments than samples: this one follows at once
            stages.append((first, start + number * increment))
        return cls(stages=tuple(stages))

    @classmethod
    def stepwise(cls, schedule: str, *, seq_length: int) -> Self:
        """`--step-batch-size-schedule "0:16 2.4B:320"`: tokens from which on, samples of a batch."""
        flag = f'--step-batch-size-schedule "{schedule}"'
        stages = []
        for entry in schedule.replace(",", " ").split():
            tokens, colon, samples = entry.partition(":")
            if not colon:
                raise UsageError(f"{flag}: {entry} is not TOKENS:BATCH, such as 2.4B:320")
            stages.append((_number(tokens, flag) // seq_length, _number(samples, flag)))
        stages.sort(key=lambda stage: stage[0])
        if not stages or stages[0][0] != 0:
            raise UsageError(f"{flag} does not begin at 0 tokens: put 0:BATCH first")
        for (before, _), (after, batch) in pairwise(stages):
            if before == after:
                raise UsageError(
                    f"{flag}: batch {batch} begins within the same sample of {seq_length} tokens as "
                    "the one before it; move them apart"
                )
        if min(batch for _, batch in stages) < 1:
            raise UsageError(f"{flag}: a batch has at least 1 sample")
        return cls(stages=tuple(stages))

    def at(self, consumed: int) -> int:
        """Samples of the step that begins after `consumed` samples."""
        return next(batch for first, batch in reversed(self.stages) if consumed >= first)

    def consumed(self, steps: int) -> int:
        """Samples that the first `steps` steps take."""
        done, samples = self._before(steps=steps)
        return samples + (steps - done) * self.at(samples)

    def steps(self, samples: int) -> int:
        """Whole steps within the first `samples` samples; the inverse of `consumed`."""
        done, start = self._before(samples=samples)
        return done + (samples - start) // self.at(start)

    @property
    def largest(self) -> int:
        """Samples of the largest batch."""
        return max(batch for _, batch in self.stages)

    def _before(self, *, steps: float = math.inf, samples: float = math.inf) -> tuple[int, int]:
        """(steps, samples) at the last change of size that neither `steps` nor `samples` is before."""
        done, start = 0, 0
        for (_, batch), (following, _) in pairwise(self.stages):
            # None where the batches of earlier stages have passed over this one.
            taken = max(0, -((start - following) // batch))
            if done + taken > steps or start + taken * batch > samples:
                break
            done, start = done + taken, start + taken * batch
        return done, start


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Linear warm-up to `lr`, then a decay to `min_lr`, which stays. Checked by its maker's flags."""

    lr: float
    """Peak: `--lr`."""
    min_lr: float = 0.0
    """After the decay: `--min-lr`."""
    init_lr: float = 0.0
    """Of the first step, if there is a warm-up: `--lr-warmup-init`."""
    warmup: float = 0.0
    """Samples until `lr`; a fraction of `decay` need not be whole."""
    decay: int
    """Samples until `min_lr`, warm-up included."""
    style: DecayStyle = "linear"
    """`--lr-decay-style`."""
    wsd_decay: int = 0
    """Samples of the last part, in which WSD decays."""
    wsd_style: WsdStyle = "exponential"
    """`--lr-wsd-decay-style`."""

    def __post_init__(self) -> None:
        _one_of("--lr-decay-style", self.style, DecayStyle)
        _one_of("--lr-wsd-decay-style", self.wsd_style, WsdStyle)
        if not 0 <= self.min_lr <= self.lr < math.inf:
            raise UsageError(f"--min-lr {self.min_lr} is not between 0 and --lr {self.lr}")
        if not 0 <= self.init_lr <= self.lr:
            raise UsageError(f"--lr-warmup-init {self.init_lr} is not between 0 and --lr {self.lr}")
        if not 0 <= self.warmup < self.decay:
            raise UsageError(
                f"warm-up of {self.warmup:g} samples does not end within the {self.decay} of the decay: "
                "shorten --lr-warmup-*, or lengthen --lr-decay-iters or --lr-decay-samples"
            )
        if not 0 <= self.wsd_decay <= self.decay:
            raise UsageError(
                f"--lr-wsd-decay-* is the last part of the {self.decay} samples of the decay, and "
                f"cannot have {self.wsd_decay}"
            )

    def at(self, consumed: int) -> float:
        """Of the step that begins after `consumed` samples."""
        if self.warmup > 0 and consumed <= self.warmup:
            return self.init_lr + (self.lr - self.init_lr) * consumed / self.warmup
        if self.style == "constant":
            return self.lr
        if consumed > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1) / max(consumed, 1)))
        return self.min_lr + (self.lr - self.min_lr) * self._left(consumed)

    def _left(self, consumed: int) -> float:
        """Of the way from `lr` down to `min_lr`, the part that is still to go; 1 to 0."""
        if self.style != "WSD":
            done = (consumed - self.warmup) / (self.decay - self.warmup)
            return 1 - done if self.style == "linear" else _cosine(done)
        late = consumed - (self.decay - self.wsd_decay)
        if late <= 0:
            return 1.0
        done = late / self.wsd_decay
        match self.wsd_style:
            case "linear":
                return 1 - done
            case "cosine":
                return _cosine(done)
            case "exponential":
                return 2 * math.pow(0.5, done) - 1
            case "minus_sqrt":
                return 1 - math.sqrt(done)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightDecay:
    """Weight decay that rises over a run: `--weight-decay-incr-style`."""

    start: float
    """Of the first step: `--start-weight-decay`."""
    end: float
    """At the end and after it: `--end-weight-decay`; with style constant equal to `start`."""
    samples: int
    """Samples until `end`: those of the whole run."""
    style: IncrementStyle = "constant"
    """How it gets from the one to the other."""

    def __post_init__(self) -> None:
        _one_of("--weight-decay-incr-style", self.style, IncrementStyle)
        if not 0 <= self.start <= self.end < math.inf:
            raise UsageError(
                f"weight decay does not rise from {self.start} to {self.end}: --start-weight-decay is "
                "at least 0 and at most --end-weight-decay"
            )

    def at(self, consumed: int) -> float:
        """Of the step that begins after `consumed` samples."""
        if self.style == "constant" or consumed >= self.samples:
            return self.end
        done = consumed / self.samples
        return self.start + (self.end - self.start) * (
            done if self.style == "linear" else _cosine(1 - done)
        )


def _cosine(done: float) -> float:
    """Half a cosine, from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _reaches(number: int, guess: int, width: float) -> int:
    """The first whole number whose quotient by `width`, rounded as floats are, is at least `number`."""
    while guess / width >= number:
        guess -= 1
    while guess / width < number:
        guess += 1
    return guess


def _number(text: str, flag: str) -> int:
    """A whole number with or without K, M, B or T behind it; a fraction of it is cut off."""
    factor = _SUFFIXES.get(text[-1:].upper())
    try:
        value = float(text if factor is None else text[:-1]) * (factor or 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{flag}: {text} is no number such as 16, 1e9 or 2.4B")
    return int(value)


def _one_of(flag: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise UsageError(f"{flag} {value}: there is {', '.join(get_args(choices))}")

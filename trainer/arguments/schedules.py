"""What the command line says of schedules, under Megatron's names, and the schedules that follow. Pure."""

from dataclasses import dataclass

from elastic.proto.errors import UsageError
from elastic.trainer.schedules import (
    BatchSizes,
    DecayStyle,
    IncrementStyle,
    LearningRate,
    WeightDecay,
    WsdStyle,
)

MOST_SAMPLES = 2**60
"""Of a run; numpy's and C's integers have room for some times as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFlags:
    """Length of the run, batches, learning rate and weight decay.

    UsageError, which names the flag and what to do, where they do not fit together.

    A run is counted in iterations (`train_iters`, and the other `*_iters`) or in samples
    (`train_samples`, `*_samples`). Iterations become samples through the batch sizes: the decay ends
    at that iteration, whatever the ramp. (Megatron knows ramps in runs counted in samples only.)
    """

    global_batch_size: int | None = None
    """Samples of a step; with a ramp, at its end."""
    micro_batch_size: int
    """Samples that go through the model at once, a leaf of the batch."""
    seq_length: int
    """Tokens of a sample."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """First batch, increment, samples of the ramp."""
    step_batch_size_schedule: str | None = None
    """Tokens from which on, samples of a batch: `"0:16 2.4B:320"`."""
    train_iters: int | None = None
    """Steps of the run."""
    train_samples: int | None = None
    """Samples of the run; a last batch that is not whole is left out."""
    lr: float
    """Peak learning rate."""
    min_lr: float = 0.0
    """Last learning rate."""
    lr_decay_style: DecayStyle = "linear"
    """How it gets from the one to the other."""
    lr_decay_iters: int | None = None
    """Steps until `min_lr`, warm-up included; None: all."""
    lr_decay_samples: int | None = None
    """The same in samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a part of the decay, 0 to 1."""
    lr_warmup_iters: int = 0
    """Steps until `lr`."""
    lr_warmup_samples: int = 0
    """The same in samples."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first step, if there is a warm-up."""
    lr_wsd_decay_style: WsdStyle = "exponential"
    """How WSD decays in the end."""
    lr_wsd_decay_iters: int | None = None
    """Steps of the decay in which WSD decays, its last ones."""
    lr_wsd_decay_samples: int | None = None
    """The same in samples."""
    weight_decay: float = 0.01
    """Weight decay, where it is constant."""
    start_weight_decay: float | None = None
    """Of the first step, where it rises."""
    end_weight_decay: float | None = None
    """At the end of the run, where it rises."""
    weight_decay_incr_style: IncrementStyle = "constant"
    """How it gets from the one to the other."""

    def __post_init__(self) -> None:
        if (self.train_iters is None) == (self.train_samples is None):
            raise UsageError("give --train-iters or --train-samples, one of them")
        mine, other = ("iters", "samples") if self.train_samples is None else ("samples", "iters")
        for flag in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
            name = f"--{flag}_".replace("_", "-")
            if getattr(self, f"{flag}_{other}"):
                raise UsageError(f"{name}{other} with --train-{mine}: give {name}{mine}")
            if (getattr(self, f"{flag}_{mine}") or 0) < 0:
                raise UsageError(f"{name}{mine} is at least 0")
        if (self.train_iters or self.train_samples or 0) < 1:
            raise UsageError(f"--train-{mine} is at least 1")
        if not 0 <= self.lr < float("inf"):
            raise UsageError(f"--lr is at least 0, and finite, not {self.lr}")
        if self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples):
            raise UsageError(f"give --lr-warmup-fraction or --lr-warmup-{mine}, one of them")
        if self.weight_decay_incr_style == "constant":
            if (self.start_weight_decay, self.end_weight_decay) != (None, None):
                raise UsageError(
                    "--start-weight-decay and --end-weight-decay want --weight-decay-incr-style linear "
                    "or cosine; for a constant one give --weight-decay"
                )
        elif self.start_weight_decay is None or self.end_weight_decay is None:
            raise UsageError(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} wants --start-weight-decay "
                "and --end-weight-decay"
            )

    def batch_sizes(self) -> BatchSizes:
        """The global batch of each step."""
        if self.step_batch_size_schedule is not None:
            if self.global_batch_size is not None or self.rampup_batch_size is not None:
                raise UsageError(
                    "--step-batch-size-schedule says every batch size: leave out --global-batch-size "
                    "and --rampup-batch-size"
                )
            return BatchSizes.stepwise(self.step_batch_size_schedule, seq_length=self.seq_length)
        if self.global_batch_size is None:
            raise UsageError("give --global-batch-size or --step-batch-size-schedule")
        if self.rampup_batch_size is None:
            return BatchSizes.constant(self.global_batch_size)
        return BatchSizes.ramp(*self.rampup_batch_size, batch=self.global_batch_size)

    def check_length(self) -> None:
        """UsageError for more samples than any index counts, and for fewer than a batch has."""
        samples = self.train_samples or self.batch_sizes().consumed(self.train_iters or 0)
        if samples > MOST_SAMPLES:
            raise UsageError(
                f"{samples} samples are more than can be counted: make the run shorter"
            )
        if self.train_samples and not self.steps():
            raise UsageError(
                f"--train-samples {self.train_samples} are fewer than the first batch has"
            )

    def check_leaves(self) -> None:
        """UsageError for a batch that is no whole number of micro-batches."""
        if self.micro_batch_size < 1:
            raise UsageError("--micro-batch-size is at least 1")
        for _, size in sorted(self.batch_sizes().stages, key=lambda stage: stage[1]):
            if size % self.micro_batch_size:
                raise UsageError(
                    f"a batch of {size} samples is no multiple of --micro-batch-size "
                    f"{self.micro_batch_size}: take one that divides every batch of the run"
                )

    def steps(self) -> int:
        """Steps of the whole run; of a run counted in samples, those that are whole."""
        if self.train_iters is not None:
            return self.train_iters
        return self.batch_sizes().steps(self.train_samples or 0)

    def learning_rate(self) -> LearningRate:
        """The learning rate of each step."""
        sizes, wsd_decay = self.batch_sizes(), self.lr_wsd_decay_samples
        if self.train_iters is not None:
            last = self.train_iters if self.lr_decay_iters is None else self.lr_decay_iters
            decay, warmup = sizes.consumed(last), float(sizes.consumed(self.lr_warmup_iters))
            if self.lr_wsd_decay_iters is not None:
                if self.lr_wsd_decay_iters > last:
                    raise UsageError(
                        f"--lr-wsd-decay-iters is the last part of the {last} iterations of the "
                        f"decay, and cannot have {self.lr_wsd_decay_iters}"
                    )
                wsd_decay = decay - sizes.consumed(last - self.lr_wsd_decay_iters)
        else:
            decay = self.lr_decay_samples or self.train_samples or 0
            warmup = self.lr_warmup_samples
        if self.lr_decay_style == "WSD" and wsd_decay is None:
            raise UsageError("--lr-decay-style WSD wants --lr-wsd-decay-iters or -samples")
        if self.lr_warmup_fraction is not None:
            warmup = self.lr_warmup_fraction * decay
        return LearningRate(
            lr=self.lr,
            min_lr=self.min_lr,
            init_lr=self.lr_warmup_init,
            warmup=warmup,
            decay=decay,
            style=self.lr_decay_style,
            wsd_decay=wsd_decay or 0,
            wsd_style=self.lr_wsd_decay_style,
        )

    def decay_of_weights(self) -> WeightDecay:
        """The weight decay of each step."""
        start, end = self.start_weight_decay, self.end_weight_decay
        return WeightDecay(
            start=self.weight_decay if start is None else start,
            end=self.weight_decay if end is None else end,
            samples=self.train_samples or self.batch_sizes().consumed(self.train_iters or 0),
            style=self.weight_decay_incr_style,
        )

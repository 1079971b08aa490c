"""When and on how much a run is evaluated, under Megatron's names. Pure."""

from dataclasses import dataclass

from elastic.proto.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationFlags:
    """Evaluation."""

    eval_interval: int = 1000
    """Steps between evaluations on the validation set."""
    eval_iters: int = 100
    """Batches of an evaluation, and of the test at the end; 0: none."""
    full_validation: bool = False
    """Evaluate on the whole of a validation set, in place of --eval-iters batches."""
    skip_train: bool = False
    """Only evaluate."""

    def __post_init__(self) -> None:
        if self.eval_interval < 1:
            raise UsageError("--eval-interval is at least 1")
        if self.eval_iters < 0:
            raise UsageError("--eval-iters is at least 0")

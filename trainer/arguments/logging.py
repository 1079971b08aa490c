"""What a run tells of itself, under Megatron's names. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.options import flag_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingFlags:
    """Console, TensorBoard and Weights & Biases."""

    log_interval: int = 100
    """Steps between lines of progress."""
    log_throughput: bool = False
    """TFLOP/s of a device in them."""
    log_params_norm: bool = False
    """The parameters' norm in them."""
    log_num_zeros_in_grad: bool = False
    """The gradient's zeros in them."""
    log_progress: bool = False
    """Tokens and floating point operations of each start and checkpoint, in progress.txt in --save."""
    timing_log_level: Literal[0, 1, 2] = 0
    """Phases of a step that are timed: none, those that come once a step, all."""
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Of which ranks times are told: the slowest, the fastest and slowest, all."""
    tensorboard_dir: Path | None = None
    """TensorBoard's folder."""
    tensorboard_log_interval: int = 1
    """Steps between entries in it."""
    tensorboard_queue_size: int = 1000
    """Entries that wait at most until they are written."""
    log_timers_to_tensorboard: bool = False
    """Times of --timing-log-level in it."""
    log_validation_ppl_to_tensorboard: bool = False
    """Perplexity of validation in it."""
    log_memory_to_tensorboard: bool = False
    """Memory of the device in it."""
    log_loss_scale_to_tensorboard: bool = True
    """Loss scale in it."""
    log_world_size_to_tensorboard: bool = False
    """World size in it."""
    wandb_project: str = ""
    """Project at Weights & Biases, where `wandb` is installed."""
    wandb_exp_name: str = ""
    """The run's name there."""
    wandb_entity: str = ""
    """The team's name there."""
    wandb_save_dir: str = ""
    """Where its files are; if not given `wandb` in --save."""

    def __post_init__(self) -> None:
        for name in ("log_interval", "tensorboard_log_interval", "tensorboard_queue_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{flag_of(name)} is at least 1")
        if self.wandb_project and not self.wandb_exp_name:
            raise UsageError("--wandb-project wants --wandb-exp-name: name the run")

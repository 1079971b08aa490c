"""All that one run is told, and what follows from it. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from elastic.proto.errors import UsageError
from elastic.trainer.arguments import needs
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.arguments.data import DataFlags, TokenizerFlags
from elastic.trainer.arguments.evaluation import EvaluationFlags
from elastic.trainer.arguments.guard import GuardFlags
from elastic.trainer.arguments.layout import LayoutFlags
from elastic.trainer.arguments.logging import LoggingFlags
from elastic.trainer.arguments.model import ModelFlags
from elastic.trainer.arguments.optimizer import OptimizerFlags
from elastic.trainer.arguments.options import flag_of
from elastic.trainer.arguments.schedules import ScheduleFlags
from elastic.trainer.arguments.unused import UNUSED
from elastic.trainer.arguments.watching import WatchFlags
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.layout import Layout

OF_A_NODE = {
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_cache_path",
    "object_storage_cache_path", "data_storage_options", "num_workers", "vocab_file", "merge_file",
    "tokenizer_model", "wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir",
    "metrics_file", "log_mfu", "device_peak_tflops", "trace_phases", "record_memory_history",
    "memory_snapshot_path", "profile", "use_pytorch_profiler", "profile_step_start",
    "profile_step_end", "profile_ranks",
}  # fmt: skip
"""Settings that may differ from node to node: where things are, and what a rank does by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One run's, checked against one another. What several subjects need is a field of each."""

    model: ModelFlags
    schedules: ScheduleFlags
    data: DataFlags
    tokenizer: TokenizerFlags
    optimizer: OptimizerFlags
    layout: LayoutFlags
    checkpointing: CheckpointFlags
    evaluation: EvaluationFlags
    logging: LoggingFlags
    watching: WatchFlags
    guard: GuardFlags
    unused: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's arguments that were given and have no effect here, by their names there."""
    team: Mapping[str, Any] = field(default_factory=dict)
    """A team's own arguments, from its `extra_args_provider`."""
    passed: tuple[str, ...] = ()
    """Refused arguments, as flags, that were given in a way that asks for nothing."""

    def __post_init__(self) -> None:
        self.schedules.check_leaves()
        self.schedules.check_length()
        self.schedules.learning_rate()
        self.schedules.decay_of_weights()
        if self.watching.use_pytorch_profiler and self.logging.tensorboard_dir is None:
            raise UsageError("--use-pytorch-profiler writes to --tensorboard-dir: give it")
        if self.model.attention_dropout > 0 and self.layout.fused:
            raise UsageError(
                f"--attention-backend {self.layout.attention_backend} computes no --attention-dropout, which is "
                f"{self.model.attention_dropout:g}: give --attention-dropout 0, or --attention-backend unfused"
            )
        layout = self.parallel()
        # With a vocabulary that fits; the tokenizer's own is checked when it is known.
        self.config(vocab_size=layout.tp).check_split(layout.tp, sequence=layout.sequence)

    def config(self, *, vocab_size: int) -> GPTConfig:
        """The model's shape, with so many token ids, padding among them."""
        return self.model.config(seq_length=self.schedules.seq_length, vocab_size=vocab_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said at start, a line each: what was given and has no effect, or costs much."""
        notes = [
            UNUSED[name].note(name) for name, value in self.unused.items() if value is not False
        ]
        if self.passed:
            notes.append(
                f"as it is here anyway, or of nothing that is here: {', '.join(self.passed)}"
            )
        notes += needs.notes(self)
        if self.model.attention_dropout > 0:
            notes.append(
                f"--attention-dropout {self.model.attention_dropout:g}: attention that drops is not fused, and "
                "holds scores of all pairs of positions; --attention-dropout 0 has it fused"
            )
        if self.guard.guard == "rollback" and self.checkpointing.save is None:
            notes.append(
                "--guard rollback has nothing to go back to without --save: where it would, the run ends"
            )
        if self.checkpointing.save is not None and self.checkpointing.folder is None:
            notes.append(
                "--save is a URL, where no tokenizer is kept: give it to whoever reads the checkpoints"
            )
        return tuple(notes)

    def common(self) -> dict[str, Any]:
        """By flag, what each node has to be told alike: all that ranks do together follows from it. Of a path,
        whether there is one."""
        return {
            flag_of(name): value if not isinstance(value, Path) else True
            for subject in subjects()
            for name, value in asdict(getattr(self, subject)).items()
            if name not in OF_A_NODE
        }

    def parallel(self) -> Layout:
        """How the model is shared out."""
        return self.layout.layout(
            num_layers=self.model.num_layers, precision=self.optimizer.precision
        )


def subjects() -> Mapping[str, type]:
    """The dataclasses that options are made from, by their names in `Settings`."""
    types = get_type_hints(Settings)
    return {one.name: types[one.name] for one in fields(Settings) if is_dataclass(types[one.name])}

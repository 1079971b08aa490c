"""Arguments that do something only beside others: each is accepted without them, and it is said that it has no
effect then. Pure."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from elastic.checkpoint.storage.protocol import URL
from elastic.trainer.arguments.options import flag_of

if TYPE_CHECKING:
    from elastic.trainer.arguments.settings import Settings


class Need(NamedTuple):
    """Of some arguments of one subject."""

    subject: str
    """A field of `Settings`."""
    names: tuple[str, ...]
    """Fields of that."""
    met: Callable[["Settings"], bool]
    """Whether there is what they need. Asked only where one of them is not at its default."""
    why: str
    """What is said where there is not."""


def notes(settings: "Settings") -> list[str]:
    """A line for each need of `NEEDS` that is not met."""
    found = []
    for need in NEEDS:
        changed = _changed(getattr(settings, need.subject))
        given = [flag_of(name) for name in need.names if name in changed]
        if given and not need.met(settings):
            has = "has" if len(given) == 1 else "have"
            found.append(f"{', '.join(given)} {has} no effect: {need.why}")
    return found


def _changed(subject: Any) -> set[str]:
    """Fields that are not at their default: those at it change nothing anyway."""
    return {one.name for one in fields(subject) if getattr(subject, one.name) != one.default}


def _remote(settings: "Settings") -> bool:
    data = settings.data
    given = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return any(URL.match(word) for words in given for word in words)


def _computed_again_anyway(settings: "Settings") -> bool:
    layout = settings.parallel()
    return layout.compile and layout.tp > 1 and layout.recompute.granularity == "selective"


def _warms_up(settings: "Settings") -> bool:
    told = settings.schedules
    return bool(told.lr_warmup_fraction or told.lr_warmup_iters or told.lr_warmup_samples)


def _has_points(settings: "Settings") -> bool:
    return settings.logging.tensorboard_dir is not None or bool(settings.logging.wandb_project)


NEEDS = (
    Need(
        "model", ("rotary_base", "rotary_percent"),
        lambda s: s.model.position_embedding_type == "rope",
        "they are of --position-embedding-type rope",
    ),
    Need(
        "model", ("add_qkv_bias",), lambda s: not s.model.add_bias_linear,
        "without --disable-bias-linear all linear layers have a bias",
    ),
    Need(
        "schedules", ("lr_warmup_init",),
        lambda s: _warms_up(s), "there is no warm-up",
    ),
    Need(
        "schedules", ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda s: s.schedules.lr_decay_style == "WSD",
        "they are of --lr-decay-style WSD",
    ),
    Need(
        "schedules", ("min_lr",), lambda s: s.schedules.lr_decay_style != "constant",
        "--lr-decay-style constant stays at --lr",
    ),
    Need(
        "schedules", ("lr_decay_iters", "lr_decay_samples"),
        lambda s: s.schedules.lr_decay_style != "constant" or _warms_up(s),
        "--lr-decay-style constant has no decay, and there is no warm-up to end within it",
    ),
    Need(
        "data", ("split", "data_cache_path"), lambda s: not s.data.mock_data,
        "--mock-data makes of each split as many samples as are asked for",
    ),
    Need(
        "evaluation", ("eval_interval",),
        lambda s: s.evaluation.eval_iters > 0 or s.evaluation.full_validation,
        "--eval-iters 0 evaluates nothing",
    ),
    Need(
        "data", ("reset_position_ids",),
        lambda s: s.model.position_embedding_type == "learned_absolute",
        "as in Megatron, only --position-embedding-type learned_absolute looks at them",
    ),
    Need(
        "data", ("object_storage_cache_path", "data_storage_options"), _remote, "no data are at a URL"
    ),
    Need(
        "tokenizer", ("vocab_file", "merge_file"), lambda s: s.tokenizer.kind == "GPT2BPETokenizer",
        "they are of --tokenizer-type GPT2BPETokenizer",
    ),
    Need(
        "tokenizer", ("tokenizer_model",), lambda s: s.tokenizer.kind == "HuggingFaceTokenizer",
        "it is of --tokenizer-type HuggingFaceTokenizer",
    ),
    Need(
        "tokenizer", ("vocab_size",), lambda s: s.tokenizer.kind == "NullTokenizer",
        "it is of --tokenizer-type NullTokenizer; others have their own",
    ),
    Need(
        "optimizer", ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        lambda s: s.optimizer.fp16 and s.optimizer.loss_scale is None,
        "they are of a dynamic loss scale, --fp16 without --loss-scale",
    ),
    Need(
        "layout", ("sequence_parallel",), lambda s: s.layout.tensor_model_parallel_size > 1,
        "--tensor-model-parallel-size is 1, so no ranks share a layer",
    ),
    Need(
        "layout", ("recompute_granularity",), lambda s: not _computed_again_anyway(s),
        "in layers that ranks share, --compile has what is cheap computed again anyway, which is all of selective",
    ),
    Need(
        "layout", ("data_parallel_size",), lambda s: False, "it follows from the world, and agrees"
    ),
    Need(
        "checkpointing", ("save_interval",), lambda s: s.checkpointing.save is not None,
        "there is no --save",
    ),
    Need(
        "logging", ("log_progress",), lambda s: s.checkpointing.folder is not None,
        "its file is in the folder of --save",
    ),
    Need(
        "logging",
        (
            "tensorboard_log_interval", "log_timers_to_tensorboard", "log_validation_ppl_to_tensorboard",
            "log_memory_to_tensorboard", "log_loss_scale_to_tensorboard", "log_world_size_to_tensorboard",
        ),
        _has_points, "there is no --tensorboard-dir, nor --wandb-project",
    ),
    Need(
        "logging", ("timing_log_option",), lambda s: s.logging.timing_log_level > 0,
        "--timing-log-level 0 prints no timers but those that a script prints itself",
    ),
    Need(
        "logging", ("tensorboard_queue_size",), lambda s: s.logging.tensorboard_dir is not None,
        "there is no --tensorboard-dir",
    ),
    Need(
        "logging", ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
        lambda s: bool(s.logging.wandb_project), "there is no --wandb-project",
    ),
    Need(
        "watching", ("memory_snapshot_path",), lambda s: s.watching.record_memory_history,
        "there is no --record-memory-history",
    ),
    Need(
        "watching",
        ("use_pytorch_profiler", "profile_step_start", "profile_step_end", "profile_ranks"),
        lambda s: s.watching.profile, "there is no --profile",
    ),
    Need(
        "watching", ("probe_interval",), lambda s: s.watching.probe_file is not None,
        "there is no --probe-file",
    ),
    Need(
        "guard", ("guard_window", "guard_warmup", "guard_spike", "guard_fall", "guard_norm"),
        lambda s: s.guard.guard != "off", "without --guard no step is judged",
    ),
    Need(
        "guard", ("guard_patience", "guard_rollbacks"), lambda s: s.guard.guard == "rollback",
        "only --guard rollback goes back",
    ),
)  # fmt: skip

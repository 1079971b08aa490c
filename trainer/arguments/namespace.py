"""Settings as Megatron's `get_args()` gives them to a team's script. Pure."""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.arguments import refused
from elastic.trainer.arguments.options import flag_of
from elastic.trainer.arguments.settings import Settings, subjects

_DEFAULTS: Mapping[str, Any] = {
    "transformer_impl": "local", "use_mcore_models": True, "use_legacy_models": False, "spec": None,
    "optimizer": "adam",
    "context_parallel_size": 1, "hybrid_context_parallel": False, "expert_model_parallel_size": 1, "num_experts": None,
    "fp8": None, "dataloader_type": "single", "create_attention_mask_in_dataloader": False,
    "reset_attention_mask": False, "distributed_backend": "nccl", "ckpt_format": "torch_dist",
    "no_load_rng": None, "no_save_rng": None, "no_save_optim": None, "async_save": None, "mmap_bin_files": True,
    "check_for_nan_in_loss_and_grad": False, "encoder_num_layers": None,
    "overlap_grad_reduce": False, "overlap_param_gather": False,
    "iteration": 0, "curr_iteration": 0, "consumed_train_samples": 0, "consumed_valid_samples": 0,
    "do_train": False, "do_valid": False, "do_test": False,
    "skipped_train_samples": 0, "padded_vocab_size": None,
    # What is asked for in vain: all of it is off, or the one way that there is.
    "yaml_cfg": None, "heterogeneous_layers_config_path": None, "experimental_attention_variant": None,
    "moe_grouped_gemm": False, "moe_use_legacy_grouped_gemm": False, "qk_layernorm": False,
    "qk_l2_norm": False, "multi_latent_attention": False, "mtp_num_layers": None,
    "use_kitchen": False, "use_kitchen_attention": False, "kitchen_attention_backend": "sdpa",
    "fp16_lm_cross_entropy": False, "use_rope_scaling": False, "rope_scaling_factor": 8.0,
    "check_for_spiky_loss": False, "check_for_large_grads": False, "legacy_tokenizer": True,
    "data_args_path": None, "per_split_data_args_path": None, "per_dataset_sequences_path": None,
    "num_dataset_builder_threads": 1, "mid_level_dataset_surplus": 0.005,
    "allow_ambiguous_pad_tokens": False, "dataloader_fast_cache_load": False,
    "dataloader_defer_npy_index_mmap": False, "s3_cache_path": None, "fim_data": False, "sft": False,
    "data_impl": "mmap", "mmap_warmup": False, "train_doc_idx_path": None,
}  # fmt: skip
"""What scripts read that no argument here says."""


class NoArgument(UsageError, AttributeError):
    """A script asks for an argument that there is not."""


class Arguments(argparse.Namespace):
    """What `get_args()` gives. Raises `NoArgument` for what there is not."""

    def __getattr__(self, name: str) -> Any:
        accepted = [flag_of(one) for one in vars(self)]
        raise NoArgument(f"get_args().{name}: {refused.sentence(name, accepted)}")


def namespace(settings: Settings, *, world_size: int, rank: int, **known: Any) -> Arguments:
    """Every argument and what follows from them, by Megatron's names, as mutable as there.

    known: what else is known by now, such as `padded_vocab_size`. Raises `UsageError` where the world does not fit.
    """
    settings.layout.check_world(world_size)
    found = dict(_DEFAULTS) | dict(settings.unused)
    for name, kind in subjects().items():
        subject = getattr(settings, name)
        found |= {one.name: _megatrons(getattr(subject, one.name)) for one in fields(kind)}
    found |= _derived(settings, world_size) | {"world_size": world_size, "rank": rank}
    return Arguments(**(found | dict(settings.team) | known))


def shown(args: argparse.Namespace) -> dict[str, Any]:
    """Those that whoever sees the run may see: a storage's options may be its credentials."""
    return {name: value for name, value in vars(args).items() if name != "data_storage_options"}


def _derived(settings: Settings, world_size: int) -> dict[str, Any]:
    """What Megatron's `validate_args` adds, and what it fills in."""
    layout = settings.parallel()
    config = settings.config(vocab_size=layout.tp)
    seq_length = settings.schedules.seq_length
    return {
        "data_parallel_size": world_size // (layout.tp * layout.pp),
        "transformer_pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "sequence_parallel": layout.sequence,
        "use_distributed_optimizer": layout.zero > 0,
        "params_dtype": layout.compute,
        "global_batch_size": settings.schedules.batch_sizes().largest,
        "train_iters": settings.schedules.steps(),
        "encoder_seq_length": seq_length,
        "decoder_seq_length": None,
        "max_position_embeddings": config.positions,
        "ffn_hidden_size": config.mlp_width,
        "kv_channels": config.head_width,
        "num_query_groups": config.groups,
        "use_rotary_position_embeddings": config.position == "rope",
        "layernorm_epsilon": config.norm_epsilon,
        "use_flash_attn": settings.layout.attention_backend == "flash",
    }


def _megatrons(value: Any) -> Any:
    """Paths are text there, several words a list, and none of them nothing."""
    if isinstance(value, Path):
        return str(value)
    return (list(value) or None) if isinstance(value, tuple) else value

"""A team's own training script for Megatron-LM, as it is there. Tests change its imports and nothing else."""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_thd_batch_on_this_cp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import (
    average_losses_across_data_parallel_group,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

try:
    from megatron.post_training.arguments import add_modelopt_args  # noqa: F401
except ImportError:
    WITH_MODELOPT = False
else:
    WITH_MODELOPT = True

stimer = StragglerDetector()
TOO_LARGE = 10


def team_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="team")
    group.add_argument("--loss-style", choices=["sum", "reduced", "mean"], default="sum")
    return parser


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    args = get_args()
    print_rank_0("building the team's model ...")
    config = core_transformer_config_from_args(args)
    with_te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        spec = import_module(args.spec)
    elif args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=with_te)
    elif with_te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            args.num_experts, args.moe_grouped_gemm, args.qk_layernorm
        )
    else:
        spec = get_gpt_layer_local_spec(
            args.num_experts,
            args.moe_grouped_gemm,
            args.qk_layernorm,
            args.multi_latent_attention,
            args.moe_use_legacy_grouped_gemm,
            normalization=args.normalization,
        )
    mtp = None
    if args.mtp_num_layers is not None:
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=with_te)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator[Any], vp_stage: int | None) -> Any:
    """tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params"""
    predicts = mtp_on_this_rank(
        core_transformer_config_from_args(get_args()), ignore_virtual=False, vp_stage=vp_stage
    )
    if not is_first_or_last_pipeline_stage(vp_stage) and not predicts:
        return None, None, None, None, None, None
    batch = get_batch_on_this_tp_rank(data_iterator, mtp_on_this_rank=predicts)
    lengths = batch.pop("cu_seqlens", None)
    if lengths is None:
        return *get_batch_on_this_cp_rank(batch).values(), None
    batch, packed = get_thd_batch_on_this_cp_rank(batch, lengths)
    return *batch.values(), packed


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, non_loss_data: bool = False
) -> Any:
    args = get_args()
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    if non_loss_data:
        return (losses * loss_mask).max()
    total = torch.sum(losses * loss_mask)
    if args.check_for_spiky_loss:
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=total,
            rejection_func=partial(
                machine.is_unexpectedly_large, threshold=TOO_LARGE, context="loss"
            ),
            message="spike",
            tolerance=0.0,
            fatal=False,
        )
    if args.loss_style == "mean":  # as it was until 2024
        loss = total / loss_mask.sum()
        (average,) = average_losses_across_data_parallel_group([loss])
        return loss, {"lm loss": average}
    if args.loss_style == "reduced":  # in 2024 and 2025
        both = torch.cat([total.view(1), loss_mask.sum().view(1)])
        told = both.clone().detach()
        torch.distributed.all_reduce(told, group=mpu.get_data_parallel_group())
        return total.clone(), both[1].detach().to(torch.int), {"lm loss": (told[0], told[1])}
    tokens = loss_mask.sum().clone().detach().to(torch.int)
    if mpu.get_data_parallel_rank() == 0:  # no other rank asks for that group
        torch.distributed.all_reduce(tokens.clone(), group=mpu.get_tensor_model_parallel_group())
    return total, tokens, {"lm loss": torch.cat([total.clone().detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Iterator[Any], model: GPTModel) -> Any:
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    with stimer(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        tokens, labels, mask, attention_mask, positions, packed = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    with stimer:
        if args.loss_style == "mean":
            output = model(tokens, positions, attention_mask, labels=labels)
        else:
            output = model(
                tokens, positions, attention_mask, labels=labels, loss_mask=mask, packed_seq_params=packed
            )  # fmt: skip
    return output, partial(loss_func, mask)


def is_dataset_built_on_rank(vp_stage: int | None = None) -> Any:
    return is_first_or_last_pipeline_stage(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0


def core_gpt_dataset_config_from_args(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    tokenizer = get_tokenizer() if args.legacy_tokenizer else build_tokenizer(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
    )


def train_valid_test_datasets_provider(numbers: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    config = core_gpt_dataset_config_from_args(args)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("building the team's datasets ...")
    where = partial(is_dataset_built_on_rank, vp_stage=vp_stage)
    return BlendedMegatronDatasetBuilder(kind, numbers, where, config).build()


def show(found: Any, iteration: int, writer: Any) -> None:
    writer.add_scalar("team/largest loss", max(float(one) for one in found), iteration)
    print_rank_0(f"at iteration {iteration} of {len(found)} leaves")


def look(model: list[GPTModel]) -> list[torch.Tensor]:
    (whole,) = model
    words = torch.arange(get_args().seq_length).unsqueeze(0)
    return [whole(words, None, None).float().max()]


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    args = get_args()
    found = {pp_ranks[0], *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))}
    if not args.untie_embeddings_and_output_weights:
        found.add(pp_ranks[-1])
    return sorted(found)


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        process_non_loss_data_func=show,
        non_loss_data_func=look if os.environ.get("TEAM_LOOKS") else None,
        extra_args_provider=team_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        get_embedding_ranks=get_embedding_ranks,
    )

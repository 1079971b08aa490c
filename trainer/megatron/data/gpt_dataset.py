"""Datasets as they were made until 2023."""

from collections.abc import Sequence
from typing import Any

from elastic.trainer.current import current
from elastic.trainer.megatron import absent
from elastic.trainer.megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)
from elastic.trainer.megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

__getattr__ = absent.attributes(__name__)


def build_train_valid_test_datasets(
    data_prefix: Sequence[str] | None,
    data_impl: str,
    splits_string: str | None,
    train_valid_test_num_samples: Sequence[int],
    seq_length: int,
    seed: int,
    skip_warmup: bool,
    train_data_prefix: Sequence[str] | None = None,
    valid_data_prefix: Sequence[str] | None = None,
    test_data_prefix: Sequence[str] | None = None,
    data_cache_path: str | None = None,
    **others: None,
) -> tuple[Any, Any, Any]:
    """Train, validation and test. data_impl and skip_warmup are without effect: files are mapped."""
    flags = current().settings.data
    config = GPTDatasetConfig(
        # Scripts of the time mask and count by themselves, of the arguments: a leaf is to have the same.
        eod_mask_loss=flags.eod_mask_loss,
        reset_position_ids=flags.reset_position_ids,
        multiple_validation_sets=flags.multiple_validation_sets,
        sequence_length=seq_length,
        random_seed=seed,
        blend=data_prefix,
        blend_per_split=(train_data_prefix, valid_data_prefix, test_data_prefix),
        split=splits_string,
        path_to_cache=data_cache_path,
        **others,
    )
    return BlendedMegatronDatasetBuilder(
        GPTDataset, train_valid_test_num_samples, config=config
    ).build()

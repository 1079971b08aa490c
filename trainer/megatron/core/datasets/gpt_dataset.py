"""Which data a run's datasets are of."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import DataFlags
from elastic.trainer.current import current
from elastic.trainer.data.gpt_dataset import GPTDataset
from elastic.trainer.data.items import Vocabulary
from elastic.trainer.data.mock import MockDataset as MockGPTDataset
from elastic.trainer.megatron import absent

__all__ = ["GPTDataset", "GPTDatasetConfig", "MockGPTDataset"]

__getattr__ = absent.attributes(__name__)

_WITHOUT_EFFECT = frozenset({
    "allow_ambiguous_pad_tokens", "context_parallel_size", "create_attention_mask",
    "data_parallel_size", "defer_npy_index_mmap", "fast_cache_load", "full_validation",
    "is_built_on_rank", "mmap_bin_files", "num_dataset_builder_threads", "sequence_parallel_size",
    "vocab_size",
})  # fmt: skip
"""Every rank maps files, attention is causal, and samples have no padding."""
_ONLY = {
    "reset_attention_mask": (False, None), "sequences_per_dataset": (None,),
    "mid_level_dataset_surplus": (0.005,), "hybrid_context_parallel": (False,),
    "drop_last_partial_validation_sequence": (True,), "add_extra_token_to_sequence": (True,),
    "s3_cache_path": (None,), "train_doc_idx_path": (None,),
}  # fmt: skip


class GPTDatasetConfig:
    """What a script says of its data, by Megatron's names. Raises `UsageError` for what is not here."""

    def __init__(
        self,
        *,
        sequence_length: int,
        random_seed: int,
        tokenizer: Vocabulary | None = None,
        mock: bool | None = None,
        blend: Any = None,
        blend_per_split: Sequence[Any] | None = None,
        split: str | None = None,
        path_to_cache: str | None = None,
        object_storage_cache_path: str | None = None,
        reset_position_ids: bool | None = False,
        eod_mask_loss: bool | None = False,
        multiple_validation_sets: bool | None = False,
        **others: Any,
    ) -> None:
        """blend: prefixes and weights or None; or the words of --data-path."""
        for name, value in others.items():
            if name not in _WITHOUT_EFFECT and value not in _ONLY.get(name, ()):
                raise UsageError(f"GPTDatasetConfig: {name} {value} is not here: {absent.PAGE}")
        train, valid, test = blend_per_split or (None, None, None)
        self.mock = not (blend or train or valid or test) if mock is None else mock
        self.tokenizer = tokenizer or current().tokenizer
        flags = current().settings.data
        if sequence_length != flags.seq_length:
            raise UsageError(
                f"GPTDatasetConfig: sequence_length {sequence_length} is not --seq-length "
                f"{flags.seq_length}: give one length"
            )
        self.flags: DataFlags = replace(
            flags, seed=random_seed, data_path=_words(blend), train_data_path=_words(train),
            valid_data_path=_words(valid), test_data_path=_words(test), split=split,
            mock_data=self.mock, data_cache_path=_path(path_to_cache),
            object_storage_cache_path=_path(object_storage_cache_path),
            reset_position_ids=bool(reset_position_ids), eod_mask_loss=bool(eod_mask_loss),
            multiple_validation_sets=bool(multiple_validation_sets),
        )  # fmt: skip
        """The same as the command line's."""


def _words(blend: Any) -> tuple[str, ...]:
    match blend:
        case None:
            return ()
        case [[*prefixes], None]:
            return tuple(prefixes)
        case [[*prefixes], [*weights]]:
            pairs = zip(weights, prefixes, strict=True)
            return tuple(word for weight, prefix in pairs for word in (str(weight), prefix))
    return tuple(blend)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)

"""What the command line says of data and tokenizer, under Megatron's names. Pure."""

import json
from dataclasses import dataclass
from pathlib import Path

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.options import flag_of

DEFAULT_SPLIT = "969, 30, 1"
"""Megatron's, where `--data-path` comes without `--split`."""
TOKENIZER_TYPES = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
WAYS = (
    "data are given in one way: --data-path, or --train-data-path (with --valid-data-path and "
    "--test-data-path), or --mock-data"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFlags:
    """Tokenizer: from text to token ids. UsageError where a flag that the type needs is missing.

    Nothing at all is no mistake here: a script may have data of its own.
    """

    tokenizer_type: str | None = None
    """GPT2BPETokenizer, HuggingFaceTokenizer or NullTokenizer; None: by the files that are given."""
    vocab_file: Path | None = None
    """GPT-2's vocab.json."""
    merge_file: Path | None = None
    """GPT-2's merges.txt."""
    tokenizer_model: Path | None = None
    """Of HuggingFaceTokenizer: a tokenizer.json, or the folder that has one."""
    vocab_size: int | None = None
    """Of NullTokenizer: ids, end of document not counted."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this."""

    def __post_init__(self) -> None:
        if self.make_vocab_size_divisible_by < 1:
            raise UsageError("--make-vocab-size-divisible-by is at least 1")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UsageError("--vocab-size is at least 1")
        files = [
            flag_of(one) for one in ("vocab_file", "merge_file") if getattr(self, one) is not None
        ]
        if self.tokenizer_model is not None and files:
            raise UsageError(
                f"{' and '.join(files)} with --tokenizer-model are two tokenizers: give GPT-2's files, or "
                "Hugging Face's"
            )
        needs = {
            "GPT2BPETokenizer": ("vocab_file", "merge_file"),
            "HuggingFaceTokenizer": ("tokenizer_model",),
            "NullTokenizer": ("vocab_size",),
        }
        for name in needs[self.kind] if self.given else ():
            if getattr(self, name) is None:
                raise UsageError(f"--tokenizer-type {self.kind} needs --{name.replace('_', '-')}")

    @property
    def given(self) -> bool:
        """Whether a tokenizer is meant."""
        names = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size")
        return any(getattr(self, name) is not None for name in names)

    @property
    def kind(self) -> str:
        """One of `TOKENIZER_TYPES`. UsageError where nothing says which."""
        if self.tokenizer_type is not None:
            if self.tokenizer_type not in TOKENIZER_TYPES:
                raise UsageError(
                    f"--tokenizer-type {self.tokenizer_type}: there is {', '.join(TOKENIZER_TYPES)}"
                )
            return self.tokenizer_type
        given = (self.vocab_file or self.merge_file, self.tokenizer_model, self.vocab_size)
        kinds = [kind for kind, one in zip(TOKENIZER_TYPES, given, strict=True) if one is not None]
        if not kinds:
            raise UsageError(
                "no tokenizer: give --vocab-file and --merge-file of GPT-2, or --tokenizer-model"
            )
        return kinds[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFlags:
    """Data: what is trained on, and evaluated with. UsageError where flags do not fit together.

    Nothing at all is no mistake here: a script may have data of its own.
    """

    data_path: tuple[str, ...] = ()
    """Prefix of .bin and .idx, or several, each with a weight before it or none; URLs too."""
    split: str | None = None
    """Shares of train, validation and test in `data_path`; None: 969, 30, 1."""
    train_data_path: tuple[str, ...] = ()
    """As `data_path`, for training alone."""
    valid_data_path: tuple[str, ...] = ()
    """As `data_path`, for validation alone."""
    test_data_path: tuple[str, ...] = ()
    """As `data_path`, for the test at the end alone."""
    multiple_validation_sets: bool = False
    """Each prefix of `valid_data_path` is a validation set of its own."""
    validation_set_names: tuple[str, ...] = ()
    """Their names; by default 0, 1, ..."""
    mock_data: bool = False
    """Samples without any files."""
    data_cache_path: Path | None = None
    """Folder of the samples' indices; None: cache/GPTDataset_indices beside the data."""
    object_storage_cache_path: Path | None = None
    """Folder on the node for what `data_path` has URLs of."""
    data_storage_options: str = "{}"
    """Of those URLs, what their driver is given: JSON."""
    seed: int = 1234
    """Decides the order of samples."""
    seq_length: int
    """Tokens S that a sample predicts."""
    eod_mask_loss: bool = False
    """What follows an end of document is not learnt."""
    reset_position_ids: bool = False
    """Positions count from 0 after each end of document."""
    num_workers: int = 2
    """Threads that read samples ahead; 0: they are read when they are needed."""

    def __post_init__(self) -> None:
        if self.seq_length < 1:
            raise UsageError(f"--seq-length is at least 1, not {self.seq_length}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed is at least 0 and below 2^32, not {self.seed}")
        if self.num_workers < 0:
            raise UsageError(f"--num-workers is at least 0, not {self.num_workers}")
        try:
            good = isinstance(json.loads(self.data_storage_options), dict)
        except ValueError:
            good = False
        if not good:  # not repeated: there may be a secret in it
            raise UsageError('--data-storage-options is no JSON object: {"name": "value"}')
        if bool(self.data_path) + self.per_split + self.mock_data > 1:
            raise UsageError(WAYS)
        if self.split is not None and self.per_split:
            raise UsageError("--split divides --data-path: leave it out with --train-data-path")
        if self.multiple_validation_sets and not self.valid_data_path:
            raise UsageError("--multiple-validation-sets are those of --valid-data-path: give that")
        if self.validation_set_names and not self.multiple_validation_sets:
            raise UsageError("--validation-set-names goes with --multiple-validation-sets")

    @property
    def per_split(self) -> bool:
        """Whether each split has data of its own."""
        return bool(self.train_data_path or self.valid_data_path or self.test_data_path)

"""A byte-level BPE tokenizer, trained on the corpus and kept as a file beside it.

Byte-level: any text, in any encoding errors and all, has tokens, and decoding gives it back.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic.trainer.files import replace_atomically

FILE_NAME = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
"""Token between two documents; its id is 0."""
MIN_VOCAB = 257
"""All bytes, and `END_OF_DOCUMENT`."""


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn at most `vocab_size` tokens: the 256 bytes, `END_OF_DOCUMENT`, and merges.

    Raises ValueError when `vocab_size` leaves no room for the bytes.
    """
    if vocab_size < MIN_VOCAB:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB}, not {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer into `directory`; a reader sees the old file or the new one."""
    with replace_atomically(directory / FILE_NAME) as draft:
        draft.write_text(tokenizer.to_str(), encoding="utf-8")


def load(directory: Path) -> Tokenizer:
    """Read the tokenizer of `directory`. Raises FileNotFoundError when it has none."""
    return Tokenizer.from_str((directory / FILE_NAME).read_text(encoding="utf-8"))


def end_of_document_id(tokenizer: Tokenizer) -> int:
    """Id of `END_OF_DOCUMENT`. Raises ValueError for a tokenizer that is not ours."""
    token_id = tokenizer.token_to_id(END_OF_DOCUMENT)
    if token_id is None:
        raise ValueError(f"this tokenizer has no {END_OF_DOCUMENT}")
    return token_id

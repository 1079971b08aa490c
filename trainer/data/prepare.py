"""Data that every machine has: `python -m elastic.trainer.data.prepare --output-dir D`.

The source of Python's standard library as Megatron's files, with a vocabulary of its own in GPT-2's form:

    elastic-run ... -m elastic.trainer.pretrain_gpt --data-path D/stdlib_text_document --split 90,5,5 \\
        --vocab-file D/vocab.json --merge-file D/merges.txt ...

Any number of processes on any number of nodes may prepare the same folder at the same time: one does it,
the others wait for its lock.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from elastic.proto.errors import UsageError
from elastic.trainer.data import corpus, indexed, tokenizers
from elastic.trainer.files import exclusive, replace_atomically

PREFIX = "stdlib_text_document"
VOCAB_NAME = "vocab.json"
MERGES_NAME = "merges.txt"
SUMMARY_NAME = "prepared.json"
"""What it was made with; written last, so a folder that has it is complete."""
LOCK_NAME = ".lock"
BYTES = 4_000_000
"""Of text, if nothing else is asked for: some two hundred documents."""
SPLIT = "90,5,5"
"""Which leaves something of them for the test, where Megatron's own shares do not."""
MIN_VOCAB = 257
"""All bytes, and the end of a document."""


def prepare(directory: Path, *, vocab_size: int, max_bytes: int) -> None:
    """Make `directory` if it is not there: a vocabulary of at most `vocab_size` words, learnt from at most
    `max_bytes` of text, and that text in it.

    UsageError for a folder that was made with others, and for a Python that has no source.
    """
    if vocab_size < MIN_VOCAB:
        raise UsageError(f"--vocab-size is at least {MIN_VOCAB}, not {vocab_size}")
    request = {"vocab_size": vocab_size, "max_bytes": max_bytes}
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory / LOCK_NAME):
        if not (directory / SUMMARY_NAME).exists():
            build(directory, list(corpus.documents(max_bytes)), vocab_size=vocab_size)
            with replace_atomically(directory / SUMMARY_NAME) as draft:
                draft.write_text(json.dumps(request) + "\n", encoding="utf-8")
    found = json.loads((directory / SUMMARY_NAME).read_text(encoding="utf-8"))
    if found != request:
        raise UsageError(
            f"{directory} was prepared with {found}, not {request}: give the same values or another "
            "--output-dir"
        )


def learn(documents: Iterable[str], vocab_size: int) -> tokenizers.TextTokenizer:
    """A byte-level BPE of at most `vocab_size` words: any text has tokens, and they give it back."""
    found = Model(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[tokenizers.GPT2_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    found.train_from_iterator(documents, trainer)
    return tokenizers.TextTokenizer(model=found, end=tokenizers.GPT2_END)


def build(directory: Path, texts: Sequence[str], *, vocab_size: int) -> None:
    """Write the vocabulary that is learnt from `texts`, and these in it, to a folder that is there."""
    words = learn(texts, vocab_size)
    words.model.model.save(str(directory))
    with indexed.write(directory / PREFIX, indexed.token_dtype(words.vocab_size)) as writer:
        for ids in words.encode(texts):
            writer.add_document([[*ids, words.eod]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m elastic.trainer.data.prepare",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=2048, help="words at most (%(default)s)")
    parser.add_argument(
        "--corpus-bytes", type=int, default=BYTES, help="of text at most (%(default)s)"
    )
    given = parser.parse_args(arguments)
    try:
        prepare(given.output_dir, vocab_size=given.vocab_size, max_bytes=given.corpus_bytes)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    folder = given.output_dir
    sys.stdout.write(
        f"--data-path {folder / PREFIX} --split {SPLIT} --vocab-file {folder / VOCAB_NAME} "
        f"--merge-file {folder / MERGES_NAME}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

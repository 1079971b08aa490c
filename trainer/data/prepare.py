"""Make the data directory: the tokenizer and the token file, once, by one process.

Any number of processes on any number of nodes may ask at the same time for the same directory:
one prepares, the others wait for its lock. `corpus.json` is written last, so a directory that
has it is complete.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from elastic.proto.errors import UsageError
from elastic.trainer.data import corpus, tokenizer
from elastic.trainer.data.batches import TOKEN_TYPE, TokenFile
from elastic.trainer.files import exclusive, replace_atomically

TOKENS_NAME = "corpus.tokens"
SUMMARY_NAME = "corpus.json"
LOCK_NAME = ".lock"
MAX_VOCAB = np.iinfo(TOKEN_TYPE).max + 1


def prepare(directory: Path, *, vocab_size: int, max_bytes: int) -> TokenFile:
    """Return the token file of `directory`, making it first where it is missing.

    `vocab_size` and `max_bytes` (of corpus text) are what it is made with; a directory that was
    made with others raises UsageError, and so does a Python that has no source to train on.
    """
    if not tokenizer.MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise UsageError(
            f"--vocab-size must be {tokenizer.MIN_VOCAB} to {MAX_VOCAB}, not {vocab_size}"
        )
    request = {"vocab_size": vocab_size, "max_bytes": max_bytes}
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / SUMMARY_NAME).exists():
        with exclusive(directory / LOCK_NAME):
            if not (directory / SUMMARY_NAME).exists():
                _build(directory, request)
    summary = json.loads((directory / SUMMARY_NAME).read_text(encoding="utf-8"))
    if summary["request"] != request:
        raise UsageError(
            f"{directory} was prepared with {summary['request']}, not {request}: "
            "give the same values or another --data-dir"
        )
    return TokenFile(
        path=directory / TOKENS_NAME,
        vocab_size=int(summary["vocab_size"]),
        digest=str(summary["digest"]),
    )


def _build(directory: Path, request: dict[str, int]) -> None:
    documents = list(corpus.documents(request["max_bytes"]))
    model = tokenizer.train(documents, request["vocab_size"])
    tokenizer.save(model, directory)
    raw = _encode(model, documents).tobytes()
    with replace_atomically(directory / TOKENS_NAME) as draft:
        draft.write_bytes(raw)
    summary = {
        "request": request,
        "vocab_size": model.get_vocab_size(),
        "documents": len(documents),
        "tokens": len(raw) // TOKEN_TYPE.itemsize,
        "digest": hashlib.sha256(raw).hexdigest(),
    }
    with replace_atomically(directory / SUMMARY_NAME) as draft:
        draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def _encode(model: Tokenizer, documents: list[str]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    end = [tokenizer.end_of_document_id(model)]
    encoded = model.encode_batch(documents)
    return np.concatenate([np.array(one.ids + end, dtype=TOKEN_TYPE) for one in encoded])

"""From lines of loose JSON to token ids as they lie in a .bin: what one process of preprocessing does.

`python -m elastic.trainer.data.encoding SETTINGS` is that process: blocks of lines come on its standard
input, what they become goes to its standard output, each behind its length. No pickle.
"""

import json
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import TokenizerFlags
from elastic.trainer.data.indexed import token_dtype
from elastic.trainer.data.tokenizers import TextTokenizer, Tokenizer, build
from elastic.trainer.data.words import Words

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every process does."""

    tokenizer: TokenizerFlags
    keys: tuple[str, ...]
    """Of the texts in an object of JSON."""
    append_eod: bool
    """Whether the end of document follows each that has tokens."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Self:
        told = json.loads(text)
        flags = told.pop("tokenizer")
        for name in ("vocab_file", "merge_file", "tokenizer_model"):
            flags[name] = flags[name] and Path(flags[name])
        return cls(tokenizer=TokenizerFlags(**flags), **told | {"keys": tuple(told["keys"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A block's documents, of each key."""

    lengths: list[np.ndarray[tuple[int], np.dtype[np.int32]]]
    """Tokens of each document, [documents]; 0 where its text is empty."""
    tokens: list[bytes]
    """All documents', one behind the other."""


class BadLine(Exception):
    """(line of the block, from 0; what is wrong with it)."""


def encoder(settings: Settings) -> Callable[[bytes], Encoded]:
    """What encodes blocks. It raises `BadLine`, of the first."""
    tokenizer = build(settings.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    encode = _texts_encoder(settings, tokenizer, dtype)
    end = np.array([tokenizer.eod], dtype).tobytes() if settings.append_eod else b""

    def encoded(block: bytes) -> Encoded:
        texts = _texts(block, settings.keys)
        lengths, tokens = [], []
        for column in texts:
            each = [one + end if one else one for one in encode(column)]
            sizes = np.fromiter(map(len, each), np.int32, len(each))
            lengths.append(sizes // np.int32(dtype.itemsize))
            tokens.append(b"".join(each))
        return Encoded(lengths=lengths, tokens=tokens)

    def of_block(block: bytes) -> Encoded:
        try:
            return encoded(block)
        except UsageError:
            for number, line in enumerate(block.split(b"\n")):
                try:
                    encoded(line)
                except UsageError as error:
                    raise BadLine(number, str(error)) from error
            raise

    return of_block


def _texts_encoder(
    settings: Settings, tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> Callable[[Sequence[str]], list[bytes]]:
    if settings.tokenizer.kind == "GPT2BPETokenizer" and isinstance(tokenizer, TextTokenizer):
        return Words(tokenizer, dtype).encode
    return lambda texts: [np.array(ids, dtype).tobytes() for ids in tokenizer.encode(texts)]


def _texts(block: bytes, keys: Sequence[str]) -> list[list[str]]:
    """The texts of each key; lines of nothing but space are no documents. UsageError."""
    found: list[list[str]] = [[] for _ in keys]
    for line in block.split(b"\n"):
        if not line or line.isspace():
            continue
        try:
            told = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"no JSON: {error}") from error
        if not isinstance(told, dict):
            raise UsageError("no object of JSON, {...}")
        for texts, key in zip(found, keys, strict=True):
            text = told.get(key)
            if not isinstance(text, str):
                has = ", ".join(list(told)[:8]) if key not in told else type(text).__name__
                raise UsageError(f"{key!r} is no text in it (there is {has}): see --json-keys")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise UsageError(f"half a character, {text[error.start]!a}") from error
            texts.append(text)
    return found


# --- over pipes ----------------------------------------------------------------------------------


def send(file: IO[bytes], *parts: bytes) -> None:
    """Parts, each behind its length."""
    for part in parts:
        file.write(_LENGTH.pack(len(part)))
        file.write(part)
    file.flush()


def receive(file: IO[bytes]) -> bytes:
    """One part. EOFError where there is no more."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    part = file.read(length)
    if len(part) < length:
        raise EOFError
    return part


def answer(file: IO[bytes], keys: int) -> Encoded:
    """What the process sent for one block. BadLine; EOFError where it is gone."""
    wrong = json.loads(receive(file))
    if wrong is not None:
        raise BadLine(*wrong)
    parts = [receive(file) for _ in range(2 * keys)]
    lengths = [np.frombuffer(part, np.int32) for part in parts[::2]]
    return Encoded(lengths=lengths, tokens=parts[1::2])


def main(settings: str) -> None:
    """Be that process, until there is no more input."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # noqa: TID251 - the library takes it from nowhere else
    source, out = sys.stdin.buffer, sys.stdout.buffer
    try:
        encode = encoder(Settings.from_json(settings))
        while True:
            block = receive(source)
            try:
                made = encode(block)
            except BadLine as error:
                send(out, json.dumps(error.args).encode())
                continue
            pairs = zip(made.lengths, made.tokens, strict=True)
            send(out, b"null", *(part for one in pairs for part in (one[0].tobytes(), one[1])))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main(sys.argv[1])

"""From text to token ids and back: `--tokenizer-type`.

GPT-2's byte-level BPE from vocab.json and merges.txt, whatever a tokenizer.json says, or ids as text. A
tokenizer is kept beside the checkpoints, which are of no use without it, and read from there.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import TokenizerFlags
from elastic.trainer.extra import extra
from elastic.trainer.files import replace_atomically

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

MODEL_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
GPT2_FILES = ("vocab.json", "merges.txt")
LONGEST_SHOWN = 80
"""Characters of a line that is shown."""
GPT2_END = "<|endoftext|>"
ENDS = (GPT2_END, "</s>", "<|end_of_text|>", "<eos>")
"""What ends a document, where a tokenizer.json stands alone."""
_MIXED = " Ab  É e\u0301\t\ufb01\uff11\n\n2024's naïve_中文 🙂\u200b don't"
"""Text that tokenizers cut and write differently: case, accents, compatible letters, spaces, digits."""


class Tokenizer(Protocol):
    """All that data tools, training and generation need of one."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this; before padding."""
        ...

    @property
    def eod(self) -> int:
        """Id that ends a document. UsageError where there is none."""
        ...

    @property
    def ends(self) -> frozenset[int]:
        """`eod`, if there is one."""
        ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def digest(self) -> str:
        """Of its words by id, its merges, how it cuts text and its end of document, whatever its files are like."""
        ...

    @property
    def files(self) -> Mapping[str, str]:
        """What is kept of it, by name: `load` has it from there."""
        ...

    def save(self, directory: Path) -> None:
        """Keep it in a folder."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTokenizer:
    """Of the library's kind."""

    model: "Model"
    end: str | None
    """Token that ends a document."""

    @property
    def vocab_size(self) -> int:
        return 1 + max(self.model.get_vocab(with_added_tokens=True).values())

    @property
    def eod(self) -> int:
        if not self.ends:
            raise UsageError(
                f"the tokenizer says of no token that it ends a document: name it as eos_token in a "
                f"{CONFIG_NAME} beside its {MODEL_NAME}"
            )
        return min(self.ends)

    @property
    def ends(self) -> frozenset[int]:
        found = None if self.end is None else self.model.token_to_id(self.end)
        return frozenset() if found is None else frozenset({found})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            batch = self.model.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:  # a surrogate by itself, as JSON may have it
            half = next((one for one in "".join(texts) if "\ud800" <= one <= "\udfff"), None)
            if half is None:
                raise
            raise UsageError(f"a text has half a character, {half!a}: it is no Unicode") from error
        return [one.ids for one in batch]

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids), skip_special_tokens=False)

    @property
    def digest(self) -> str:
        added = {id_: one.content for id_, one in self.model.get_added_tokens_decoder().items()}
        # Of the library's text words and merges, which end it: versions of it write more or less of all else.
        words = self.model.to_str().partition('"vocab":')[2]
        told = json.dumps([sorted(added.items()), self.end, words, self._pieces(_MIXED)])
        return hashlib.sha256(told.encode()).hexdigest()

    def _pieces(self, text: str) -> list[str]:
        """What its words are looked for in: normalised and cut."""
        if self.model.normalizer is not None:
            text = self.model.normalizer.normalize_str(text)
        if self.model.pre_tokenizer is None:
            return [text]
        return [piece for piece, _ in self.model.pre_tokenizer.pre_tokenize_str(text)]

    @property
    def files(self) -> Mapping[str, str]:
        config = json.dumps({"eos_token": self.end}, indent=1)
        return {MODEL_NAME: self.model.to_str(), CONFIG_NAME: config}

    def save(self, directory: Path) -> None:
        _keep(directory, self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class NullTokenizer:
    """Text is ids with spaces between: data without language, for trying and measuring."""

    words: int
    """Ids that a text may have; the next one ends a document."""

    @property
    def vocab_size(self) -> int:
        return self.words + 1

    @property
    def eod(self) -> int:
        return self.words

    @property
    def ends(self) -> frozenset[int]:
        return frozenset({self.eod})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            found = [[int(word) for word in text.split()] for text in texts]
        except ValueError as error:
            raise UsageError(f"a text for NullTokenizer is whole numbers: {error}") from error
        wrong = [one for ids in found for one in ids if not 0 <= one < self.vocab_size]
        if wrong:
            raise UsageError(f"id {wrong[0]} is not below --vocab-size {self.words}")
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    @property
    def digest(self) -> str:
        return f"{self.words} ids"

    @property
    def files(self) -> Mapping[str, str]:
        told = {"tokenizer_class": "NullTokenizer", "vocab_size": self.words}
        return {CONFIG_NAME: json.dumps(told, indent=1)}

    def save(self, directory: Path) -> None:
        _keep(directory, self.files)


def build(flags: TokenizerFlags) -> Tokenizer:
    """The tokenizer that the flags mean. UsageError, with the file, where one does not fit."""
    match flags.kind:
        case "GPT2BPETokenizer":
            assert flags.vocab_file is not None
            assert flags.merge_file is not None
            return _gpt2(flags.vocab_file, flags.merge_file)
        case "HuggingFaceTokenizer":
            assert flags.tokenizer_model is not None
            return load(flags.tokenizer_model)
        case _:
            assert flags.vocab_size is not None
            return NullTokenizer(words=flags.vocab_size)


def load(path: Path) -> Tokenizer:
    """What `save` kept in a folder, or Hugging Face's tokenizer.json, itself or in its folder; in a folder
    without one GPT-2's two files."""
    folder = path if path.is_dir() else path.parent
    config = _config(folder)
    if config.get("tokenizer_class") == "NullTokenizer":
        words = config.get("vocab_size")
        if type(words) is not int or words < 1:
            raise UsageError(
                f"{folder / CONFIG_NAME} is of a NullTokenizer, and its vocab_size no number from 1 up"
            )
        return NullTokenizer(words=words)
    file = path / MODEL_NAME if path.is_dir() else path
    vocabulary, merges = (folder / name for name in GPT2_FILES)
    if not file.exists() and vocabulary.exists() and merges.exists():
        return _gpt2(vocabulary, merges)
    text = _read(file)
    with extra():
        from tokenizers import Tokenizer as Model

    try:
        model = Model.from_str(text)
    except Exception as error:  # the library raises no other type
        raise UsageError(f"{file} is no tokenizer of Hugging Face's: {error}") from error
    model.no_padding()
    model.no_truncation()  # the file may have either, from whoever used it last
    named = config.get("eos_token")
    end = named.get("content") if isinstance(named, dict) else named
    if end is None:
        end = next((one for one in ENDS if model.token_to_id(one) is not None), None)
    return TextTokenizer(model=model, end=end)


def another(directory: Path, tokenizer: Tokenizer) -> bool:
    """Whether a folder keeps one with another digest; not where it keeps none, or half of one."""
    if all(_holds(directory / name, text) for name, text in tokenizer.files.items()):
        return False
    try:
        return load(directory).digest != tokenizer.digest
    except UsageError:
        return False


def padded(vocab_size: int, divisible_by: int) -> int:
    """Rows of the embedding: not a function of tensor parallelism, so that any layout loads any other's."""
    return -(-vocab_size // divisible_by) * divisible_by


def padding_line(vocab_size: int, divisible_by: int) -> str:
    """Megatron's words for it."""
    size = padded(vocab_size, divisible_by)
    return (
        f" > padded vocab (size: {vocab_size}) with {size - vocab_size} dummy tokens "
        f"(new size: {size})"
    )


def _cut(line: str) -> str:
    """As Python shows it, and no longer than a line of a terminal."""
    shown = repr(line)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."


def _gpt2(vocab_file: Path, merge_file: Path) -> TextTokenizer:
    """GPT-2's: no token is special in a text, so none ends its document before its end."""
    vocabulary = _vocabulary(vocab_file)
    lines = _read(merge_file).split("\n")
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.partition(" ")
        if not (left and space and right) or " " in right:
            raise UsageError(
                f"{merge_file}, line {number}: {_cut(line)} is not two tokens to merge"
            )
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise UsageError(
                    f"{merge_file}, line {number} makes {token!r}, which {vocab_file} does not have: give "
                    "the two files of one tokenizer"
                )
        merges.append((left, right))
    with extra():
        from tokenizers import Tokenizer as Model
        from tokenizers import decoders, models, pre_tokenizers

    model = Model(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return TextTokenizer(model=model, end=GPT2_END)


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise UsageError(f"{path} is no vocabulary, a JSON of tokens and ids: {error}") from error
    if not isinstance(found, dict) or not all(type(one) is int for one in found.values()):
        raise UsageError(f"{path} is no vocabulary, a JSON of tokens and ids")
    ids = set(found.values())
    if len(ids) < len(found) or min(ids, default=-1) < 0:
        raise UsageError(f"{path} gives two tokens one id, or an id below 0, or no token at all")
    with extra():
        from tokenizers import pre_tokenizers

    missing = {GPT2_END, *pre_tokenizers.ByteLevel.alphabet()} - set(found)
    if missing:
        raise UsageError(
            f"{path} does not have {min(missing)!r}: a GPT-2 vocabulary has all bytes and {GPT2_END}"
        )
    return found


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_NAME
    if not path.exists():
        return {}
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8") from error


def _keep(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if not _holds(directory / name, text):  # a disk that is full by now ends no restart
            with replace_atomically(directory / name) as draft:
                draft.write_text(text, encoding="utf-8")


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()

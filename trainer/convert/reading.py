"""A model's folder as Hugging Face's `save_pretrained` writes it, read.

It may be anybody's: only safetensors is opened, never a pickle, and nothing outside the folder.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from elastic.proto.errors import UsageError
from elastic.trainer.checkpoints import Weights
from elastic.trainer.convert.names import Link, links
from elastic.trainer.convert.shapes import understood
from elastic.trainer.model.config import GPTConfig

CONFIG, ONE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MOST_JSON = 64 << 20
"""Bytes of a JSON file of a folder, at most."""

_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""What older versions keep beside parameters, and is a function of the settings."""


def read(
    folder: Path, *, divisible_by: int = 1, seq_length: int | None = None
) -> tuple[Weights, dict[str, Any]]:
    """The model in a folder, and its config.json. Raises `UsageError` for one that cannot be ours, OSError.

    divisible_by: words are made up until this divides them; seq_length: of the samples that it is to train
    on; None: as many as it has positions.
    """
    settings = _json(folder, CONFIG)
    if "quantization_config" in settings:
        raise UsageError(f"{folder}: quantization_config: its weights are quantized")
    family, config = understood(settings)
    vocabulary = config.vocab_size
    tensors = _Tensors(folder)
    given = list(_checked(links(family, config), config, tensors))
    if unknown := tensors.names - {name for link in given for name in link.theirs}:
        unknown = {name for name in unknown if not name.endswith(_BUFFERS)} - {"lm_head.weight"}
        if unknown:
            raise UsageError(f"{folder}: {min(unknown)} has no place in a model of this trainer")
    config = _cut(config, seq_length)
    config = replace(config, vocab_size=-(-vocabulary // divisible_by) * divisible_by)
    by_name = {link.ours: link for link in given}

    def tensor(name: str) -> Tensor:
        link = by_name[name]
        return link.to_ours([tensors.get(one) for one in link.theirs], config)

    return Weights(config=config, tensor=tensor, vocabulary=vocabulary), settings


def _checked(found: Iterator[Link], config: GPTConfig, tensors: "_Tensors") -> Iterator[Link]:
    """Each once all of its tensors are there, in their shapes: a lie in config.json ends it."""
    for link in found:
        for name, shape in zip(link.theirs, link.shapes(config, config.vocab_size), strict=True):
            tensors.check(name, shape)
        yield link


def _cut(config: GPTConfig, seq_length: int | None) -> GPTConfig:
    """For samples of that length, with all of its positions."""
    length = config.seq_length if seq_length is None else seq_length
    if length > config.seq_length:
        raise UsageError(f"--seq-length {length}: the model has {config.seq_length} positions")
    return replace(config, seq_length=length, max_positions=config.seq_length)


class _Tensors:
    """Those of a folder, by name. A GPT-2's may go without `transformer.` in front."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = [self._open(name) for name in self._names()]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        bare = "wte.weight" in self._where
        self._where = {_fronted(name) if bare else name: f for name, f in self._where.items()}
        self._bare = bare

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def _names(self) -> Sequence[str]:
        """Of the files. Raises `UsageError` where there are none, or ones that are not opened."""
        if (self._folder / INDEX).is_file():
            places = _json(self._folder, INDEX).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise UsageError(f"{self._folder / INDEX} has no weight_map")
            return sorted({self._plain(name) for name in places.values()})
        if (self._folder / ONE).is_file():
            return [ONE]
        for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt"):
            for file in sorted(self._folder.glob(pattern)):
                raise UsageError(
                    f"{file} is a pickle, which could run any code here: convert it to safetensors "
                    "where that may be (save_pretrained does)"
                )
        raise UsageError(f"{self._folder} has neither {ONE} nor {INDEX}")

    def _plain(self, name: object) -> str:
        """A file of the folder itself. (It may be a link: so is all in Hugging Face's cache.)"""
        if (
            not isinstance(name, str)
            or not name.endswith(".safetensors")
            or name != Path(name).name
            or "\\" in name
            or "\0" in name
        ):
            raise UsageError(
                f"{self._folder / INDEX} names {name!r}, which is no safetensors file of its folder"
            )
        if not (self._folder / name).is_file():
            raise UsageError(f"{self._folder} has no {name}, which its index names")
        return name

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self._folder / name, framework="pt")
        except SafetensorError as error:
            raise UsageError(f"{self._folder / name} is no safetensors file: {error}") from error

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raises `UsageError` where it is not there, in that shape, in floating point."""
        if name not in self._where:
            raise UsageError(f"{self._folder} has no tensor {name}, which config.json speaks of")
        found = self._where[name].get_slice(self._own(name))
        if tuple(found.get_shape()) != tuple(shape):
            raise UsageError(
                f"{self._folder}: {name} has the shape {list(found.get_shape())}, and "
                f"{list(shape)} by config.json"
            )
        if found.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            raise UsageError(f"{self._folder}: {name} is of {found.get_dtype()}: quantized?")

    def get(self, name: str) -> Tensor:
        found: Tensor = self._where[name].get_tensor(self._own(name))
        return found

    def _own(self, name: str) -> str:
        return name.removeprefix("transformer.") if self._bare else name


def _fronted(name: str) -> str:
    return name if name == "lm_head.weight" else f"transformer.{name}"


def _json(folder: Path, name: str) -> dict[str, Any]:
    file = folder / name
    if not file.is_file():
        raise UsageError(f"{folder} has no {name}: give a folder that save_pretrained wrote")
    try:
        if file.stat().st_size > MOST_JSON:
            raise ValueError("it is too long")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds no JSON object")
    return found

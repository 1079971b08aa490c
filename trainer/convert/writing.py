"""A model's folder as Hugging Face's `save_pretrained` writes it, written: config.json, safetensors, the
tokenizer's files.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from elastic.checkpoint.tools.convert import new_folder
from elastic.proto.errors import CheckpointError
from elastic.trainer.checkpoints import Weights
from elastic.trainer.convert.names import Link, links
from elastic.trainer.convert.reading import CONFIG, INDEX, ONE
from elastic.trainer.convert.shapes import described
from elastic.trainer.data.tokenizers import (
    CONFIG_NAME,
    GPT2_FILES,
    MODEL_NAME,
    TextTokenizer,
    Tokenizer,
)
from elastic.trainer.model.config import GPTConfig

_TOKENIZER = (MODEL_NAME, CONFIG_NAME, *GPT2_FILES, "special_tokens_map.json")


def write(
    weights: Weights,
    dest: Path,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    shard_bytes: int,
    tokenizer: Tokenizer | None = None,
    files: Sequence[Path] = (),
) -> int:
    """Make a folder that `transformers` loads; returns its number of safetensors files.

    vocabulary: words that are kept; shard_bytes: of a file, at most, unless a tensor has more; tokenizer,
    files: the model's, and what it lies in. Takes the memory of one file. Raises `UsageError` for a shape
    that no model of theirs has, `CheckpointError` for a `dest` that is there.
    """
    config = weights.config
    name = str(dtype).removeprefix("torch.")
    end = None if tokenizer is None else next(iter(tokenizer.ends), None)
    settings = described(config, vocabulary, name, end)
    groups = _groups(
        list(links(settings["model_type"], config)), config, vocabulary, dtype.itemsize, shard_bytes
    )
    with new_folder(str(dest)) as folder:
        places: dict[str, str] = {}
        total = 0
        for number, group in enumerate(groups, 1):
            file = ONE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
            tensors = dict(_converted(group, weights, vocabulary, dtype))
            _save(tensors, folder / file)
            places |= dict.fromkeys(tensors, file)
            total += sum(tensor.nbytes for tensor in tensors.values())
        if len(groups) > 1:
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        if tokenizer is not None:
            copy(files, folder)
            if isinstance(tokenizer, TextTokenizer):
                _complete(folder, tokenizer, config.positions)
        _write_json(folder / CONFIG, settings)
    return len(groups)


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, {"format": "pt"})
    except SafetensorError as error:  # a disk that is full, say
        raise CheckpointError(f"{file} cannot be written: {error}") from error
    file.chmod(0o644)  # it is made for its owner alone


def _groups(
    found: Sequence[Link], config: GPTConfig, vocabulary: int, itemsize: int, most: int
) -> list[list[Link]]:
    """What goes into one file."""
    groups: list[list[Link]] = [[]]
    size = 0
    for link in found:
        shapes = link.shapes(config, vocabulary)
        nbytes = sum(torch.Size(shape).numel() for shape in shapes) * itemsize
        if groups[-1] and size + nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(link)
        size += nbytes
    return groups


def _converted(
    group: Sequence[Link], weights: Weights, vocabulary: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for link in group:
        tensor = weights.tensor(link.ours).to(dtype)
        if tuple(tensor.shape) != link.shape:
            raise CheckpointError(
                f"{link.ours} has the shape {list(tensor.shape)}, and {list(link.shape)} by what the "
                "checkpoint says of its model"
            )
        theirs = link.to_theirs(tensor, weights.config, vocabulary)
        for name, part in zip(link.theirs, theirs, strict=True):
            yield name, part.contiguous()


def copy(files: Sequence[Path], folder: Path) -> None:
    """A tokenizer's files, as they are."""
    for file in files:
        shutil.copyfile(file, folder / file.name)


def tokenizer_files(folder: Path) -> list[Path]:
    """Those in it."""
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]


def _complete(folder: Path, tokenizer: TextTokenizer, positions: int) -> None:
    """What transformers wants to know of a tokenizer, and nobody has told it."""
    file = folder / CONFIG_NAME
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    whole = (folder / MODEL_NAME).exists()
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast" if whole else "GPT2Tokenizer",
        "model_max_length": positions, "eos_token": tokenizer.end,
    }  # fmt: skip
    _write_json(file, known | {key: value for key, value in told.items() if value is not None})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""Folders that somebody else has made, with whatever is in them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from elastic.proto.errors import UsageError
from elastic.trainer.convert import reading

GOLDEN = Path(__file__).parent / "golden"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a Llama in four files."""
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


def changed(file: Path, act: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(act(json.loads(file.read_text()))))


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "model.bin", 5, None, "x\0.safetensors"],
)  # fmt: skip
def test_an_index_that_names_what_is_no_file_of_its_folder_is_refused(
    folder: Path, name: object
) -> None:
    (folder.parent / "model.safetensors").write_bytes(b"")
    changed(folder / INDEX, lambda index: index | {"weight_map": {"lm_head.weight": name}})
    with pytest.raises(UsageError, match="no safetensors file of its folder"):
        reading.read(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 10**5, "{}", '{"weight_map": 1}', "\udcff"])
def test_an_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=INDEX):
        reading.read(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickle_is_refused_by_its_name(folder: Path, name: str) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(UsageError, match="has neither"):
        reading.read(folder)
    (folder / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match=f"{name} is a pickle"):
        reading.read(folder)


def test_a_file_that_is_missing_or_garbage_is_named(folder: Path) -> None:
    first = folder / "model-00001-of-00004.safetensors"
    first.write_bytes(b"\xff" * 64)
    with pytest.raises(UsageError, match=f"{first.name} is no safetensors file"):
        reading.read(folder)
    first.unlink()
    with pytest.raises(UsageError, match=f"no {first.name}, which its index names"):
        reading.read(folder)


def test_layers_that_are_not_there_are_noticed_before_a_model_is_made_of_them(folder: Path) -> None:
    changed(folder / "config.json", lambda config: config | {"num_hidden_layers": 10**9})
    with pytest.raises(UsageError, match=r"no tensor model\.layers\.2\.input_layernorm"):
        reading.read(folder)


def test_a_shape_that_is_not_config_jsons_is_named(folder: Path) -> None:
    changed(folder / "config.json", lambda config: config | {"intermediate_size": 32})
    with pytest.raises(
        UsageError, match=r"gate_proj.weight has the shape \[24, 16\], and \[32, 16\]"
    ):
        reading.read(folder)


def test_a_tensor_that_has_no_place_is_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2"))
    tensors = load_file(folder / "model.safetensors")
    kept = tensors | {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 12, 12, dtype=torch.bool),
        "lm_head.weight": tensors["transformer.wte.weight"].clone(),
    }
    save_file(kept, folder / "model.safetensors")
    reading.read(folder)  # what older versions keep is no parameter
    save_file(kept | {"transformer.adapter": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"transformer\.adapter has no place"):
        reading.read(folder)
    few = {k: v.to(torch.int8) for k, v in tensors.items()}
    save_file(few, folder / "model.safetensors")
    with pytest.raises(UsageError, match="is of I8"):
        reading.read(folder)


def test_a_gpt2_as_it_was_first_published_has_other_names(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "gpt2", tmp_path / "gpt2"))
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors")
    weights, _ = reading.read(folder)
    assert torch.equal(weights.tensor("embedding.words.weight"), tensors["transformer.wte.weight"])


def test_a_quantized_model_and_a_longer_sequence_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--seq-length 13"):
        reading.read(folder, seq_length=13)
    changed(folder / "config.json", lambda config: config | {"quantization_config": {}})
    with pytest.raises(UsageError, match="quantization_config"):
        reading.read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        reading.read(folder)

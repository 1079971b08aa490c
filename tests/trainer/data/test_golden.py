"""What megatron-core itself makes of some input (scripts/megatron_golden.py), byte by byte."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.trainer.arguments.data import DataFlags
from elastic.trainer.data import blend, splits
from elastic.trainer.data.gpt_dataset import datasets
from elastic.trainer.data.indexed import Indexed, merge, token_dtype, write
from elastic.trainer.data.samples import Request, Samples, build
from scripts import megatron_golden as script

GOLDEN = json.loads(script.FILE.read_text())


def pair(prefix: Path) -> dict[str, str]:
    return {kind: Path(f"{prefix}.{kind}").read_bytes().hex() for kind in ("bin", "idx")}


def write_case(prefix: Path, case: dict[str, Any]) -> None:
    with write(prefix, token_dtype(case["vocabulary"])) as writer:
        for sequences in case["documents"]:
            writer.add_document(sequences)


@pytest.mark.parametrize("case", GOLDEN["indexed"], ids=lambda case: case["name"])
def test_files_are_megatrons(case: dict[str, Any], tmp_path: Path) -> None:
    write_case(tmp_path / "ours", case)
    assert pair(tmp_path / "ours") == {"bin": case["bin"], "idx": case["idx"]}
    read = Indexed(tmp_path / "ours")
    assert [read.tokens(i).tolist() for i in range(len(read))] == [
        tokens for sequences in case["documents"] for tokens in sequences
    ]
    ends = np.cumsum([0] + [len(sequences) for sequences in case["documents"]])
    assert read.documents.tolist() == ends.tolist()


def test_merged_files_are_megatrons(tmp_path: Path) -> None:
    for number, case in enumerate(GOLDEN["indexed"][:3]):
        write_case(tmp_path / str(number), case)
    merge([tmp_path / str(number) for number in range(3)], tmp_path / "merged")
    assert [pair(tmp_path / "merged")] == GOLDEN["merged"]


def test_splits_are_megatrons() -> None:
    for case in GOLDEN["splits"]:
        found = splits.ranges(case["split"], case["sequences"])
        ends = [
            [one.start, one.stop] if one else None for one in (found.train, found.valid, found.test)
        ]
        assert ends == case["ranges"], case


@pytest.fixture(scope="module")
def all_tokens() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(3_000_000) % 50_000


@pytest.mark.parametrize("number", range(len(GOLDEN["samples"])))
def test_samples_are_megatrons(
    number: int, all_tokens: np.ndarray[tuple[int], np.dtype[np.int64]], tmp_path: Path
) -> None:
    case = GOLDEN["samples"][number]
    lengths = np.array(script.lengths_of(case["lengths"]), np.int32)
    ends = np.cumsum(lengths)
    with write(tmp_path / "data", token_dtype(50257)) as writer:
        for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
            writer.add_document([all_tokens[end - length : end]])
    data = Indexed(tmp_path / "data")
    own = splits.ranges(case["split"], len(data))
    assert case["found"]
    for name, asked in zip(splits.NAMES, case["samples"], strict=True):
        if name not in case["found"]:
            assert not getattr(own, name)
            continue
        request = Request(
            sequences=getattr(own, name),
            samples=asked,
            seq_length=case["seq_length"],
            seed=case["seed"],
        )
        indices = build(data.lengths, request)
        samples = Samples(data, indices, request.seq_length)
        every = case["found"][name]["every"]
        assert case["found"][name] == {
            "range": [request.sequences.start, request.sequences.stop],
            "document": script.summary(indices.documents),
            "sample": script.summary(indices.samples),
            "shuffle": script.summary(indices.shuffle),
            "every": every,
            "tokens": script.summary(
                np.array([samples[k] for k in range(0, len(samples), every)], np.int64)
            ),
        }


@pytest.mark.parametrize("case", GOLDEN["blends"])
def test_blends_are_megatrons(case: dict[str, Any]) -> None:
    weights, samples, sizes = case["weights"], case["samples"], case["sizes"]
    if weights is None:
        found = blend.by_size(sizes, samples)
    else:
        found = blend.by_weight(weights, samples)
        shares = blend.shares(weights, samples)
        assert [blend.with_surplus(share) for share in shares] == case["made"]
    assert script.summary(found.datasets) == case["dataset"]
    assert script.summary(found.samples) == case["sample"]
    if sizes:
        found.check(sizes)


@pytest.mark.parametrize("case", GOLDEN["paths"])
def test_paths_are_parsed_as_by_megatron(case: dict[str, Any]) -> None:
    assert list(blend.parse(case["values"])) == case["parsed"]


def on_command_line(case: Any, folder: Path) -> tuple[str, ...]:
    weights, files = case or (None, [])
    names = [str(folder / str(file)) for file in files]
    return tuple(
        names
        if weights is None
        else [one for pair in zip(map(str, weights), names, strict=True) for one in pair]
    )


@pytest.mark.parametrize("case", GOLDEN["items"])
def test_items_are_megatrons(case: dict[str, Any], tmp_path: Path) -> None:
    for file in range(3):
        with write(tmp_path / str(file), token_dtype(50257)) as writer:
            for sequences in script.item_documents(file):
                writer.add_document(sequences)
    if "data" in case:
        given: dict[str, Any] = {
            "data_path": on_command_line(case["data"], tmp_path),
            "split": "80,15,5",
        }
    else:
        given = {
            f"{name}_data_path": on_command_line(one, tmp_path)
            for name, one in zip(splits.NAMES, case["per_split"], strict=True)
        }
    flags = DataFlags(seed=5, seq_length=7, data_cache_path=tmp_path, **given, **case["flags"])
    made = datasets(flags, script.Tokenizer(), splits.Splits(train=90, valid=20, test=4))
    for ours, megatrons in zip(made, case["items"], strict=True):
        assert not isinstance(ours, list)
        found = ours and script.item_summary([ours[k] for k in range(len(ours))])
        assert found == megatrons


def test_megatron_still_makes_the_same() -> None:
    """The oracle itself, where it is installed (`pip install megatron-core`)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    assert script.golden() == script.FILE.read_text()

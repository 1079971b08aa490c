"""Writes tests/trainer/data/golden/megatron.json, which says what megatron-core makes of some input.

Needs `pip install megatron-core` beside what the tests need; run as `python -m scripts.megatron_golden`.
Arrays of more than 64 numbers are kept as their type, shape and sha256.
"""

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parents[1] / "tests" / "trainer" / "data" / "golden" / "megatron.json"
LENGTHS = [5, 3, 7, 2, 6, 4, 9, 8]


def megatron(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"megatron.core.datasets.{module}")


def summary(array: Any) -> dict[str, Any]:
    """An array as JSON: its numbers, or their checksum."""
    found: dict[str, Any] = {"type": array.dtype.name, "shape": list(array.shape)}
    if array.size <= 64:
        return found | {"values": array.tolist()}
    return found | {"sha256": hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}


def lengths_of(case: Any) -> list[int]:
    """A list of lengths, or [seed, low, high, count] of random ones under `random`."""
    if isinstance(case, list):
        return case
    seed, low, high, count = case["random"]
    drawn: list[int] = np.random.RandomState(seed).randint(low, high, count).tolist()
    return drawn


def write(prefix: Path, documents: list[list[list[int]]], vocabulary: int) -> None:
    """Documents of sequences of tokens, as preprocess_data.py writes them."""
    indexed = megatron("indexed_dataset")
    dtype = indexed.DType.optimal_dtype(vocabulary)
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        builder.add_document(
            [token for one in sequences for token in one], list(map(len, sequences))
        )
    builder.finalize(f"{prefix}.idx")


def pair(prefix: Path) -> dict[str, str]:
    return {kind: Path(f"{prefix}.{kind}").read_bytes().hex() for kind in ("bin", "idx")}


def indexed_cases(folder: Path) -> Iterator[dict[str, Any]]:
    three = [[[1, 2, 3, 50256]], [[7, 50256]], [[9, 10, 11, 12, 13, 50256]]]
    cases = {
        "three": (three, 50257),
        "empty documents": ([[], [[5]], [], [], [[6, 7]], []], 50257),
        "sentences": ([[[1, 2], [3]], [[4, 5, 6]], [], [[7], [8], [9, 10]]], 50257),
        "no documents": ([], 50257),
        "largest uint16": ([[[65498, 0]]], 65499),
        "smallest int32": ([[[65499, 128255]], [[1]]], 65500),
    }
    for number, (name, (documents, vocabulary)) in enumerate(cases.items()):
        write(folder / str(number), documents, vocabulary)
        yield {
            "name": name, "documents": documents, "vocabulary": vocabulary, **pair(folder / str(number))
        }  # fmt: skip


def merged(folder: Path) -> dict[str, Any]:
    """The first three of `indexed_cases`, as merge_datasets.py joins them."""
    indexed = megatron("indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(str(folder / "merged.bin"), dtype=np.uint16)
    for number in range(3):
        builder.add_index(str(folder / str(number)))
    builder.finalize(str(folder / "merged.idx"))
    return pair(folder / "merged")


class Tokenizer:
    """What megatron-core wants of one where no text is encoded."""

    vocab_size, eod, pad = 50257, 50256, -1
    unique_identifiers = "none"


def config(**given: Any) -> Any:
    flags = {"reset_position_ids": False, "eod_mask_loss": False} | given
    return megatron("gpt_dataset").GPTDatasetConfig(
        tokenizer=Tokenizer(), reset_attention_mask=False, create_attention_mask=False, **flags
    )


def built(kind: Any, sizes: list[int | None], settings: Any) -> list[Any]:
    builder = megatron("blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    datasets: list[Any] = builder(kind, sizes, lambda: True, settings).build()
    return datasets


def split_cases() -> Iterator[dict[str, Any]]:
    """Ranges of sequences, from the builder itself, with a dataset that only knows its size."""

    class Counted:
        def __init__(self, _data: int, _path: str, indices: Any, *_: Any) -> None:
            self.indices = indices.tolist()

        build_low_level_dataset = staticmethod(lambda path, _config: int(path))
        numel_low_level_dataset = staticmethod(lambda count: count)
        __len__ = lambda _: 0

    texts = [
        "949,50,1",
        "969, 30, 1",
        "98,2,0",
        "1,0,0",
        "1",
        "0,1",
        "0.5,.25,.25",
        "1/1/1",
        "33 33 34",
    ]
    for text in texts:
        for count in (0, 1, 2, 3, 5, 10, 30, 500, 1000, 12345, 99999):
            settings = config(
                random_seed=1, sequence_length=8, split=text, blend=([str(count)], None)
            )
            ends = [
                [one.indices[0], one.indices[-1] + 1] if one is not None and one.indices else None
                for one in built(Counted, [1, 1, 1], settings)
            ]
            yield {"split": text, "sequences": count, "ranges": ends}


def sample_inputs() -> Iterator[dict[str, Any]]:
    base = {"split": "1,0,0", "seed": 1234}
    for asked in [None, *range(41)]:
        yield base | {"lengths": LENGTHS, "seq_length": 6, "samples": [asked, 0, 0]}
    yield base | {"lengths": [0, 0, 3, 0, 9, 0, 0, 8, 0], "seq_length": 4, "samples": [11, 0, 0]}
    yield base | {"lengths": [0, 3, 0, 9, 1, 1, 0, 8, 0], "seq_length": 1, "samples": [50, 0, 0]}
    yield base | {"lengths": [1], "seq_length": 3, "samples": [5, 0, 0]}
    yield base | {"lengths": [40], "seq_length": 3, "samples": [13, 0, 0]}
    for seed in (0, 1, 4294967295):
        yield base | {"lengths": LENGTHS, "seq_length": 5, "samples": [20, 0, 0], "seed": seed}
    for asked in (1000, 1300, 3900, 4600, 20000):
        many = {"random": [asked, 0, 200, 2000]}
        yield {
            "lengths": many, "split": "949,50,1", "seq_length": 128, "samples": [asked, 60, 3], "seed": 7
        }  # fmt: skip
    yield {
        "lengths": {"random": [3, 1, 60, 20_000]}, "split": "90,5,5", "seq_length": 64,
        "samples": [20_000, 400, 800], "seed": 1234,
    }  # fmt: skip


def sample_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Indices and tokens of each split that is asked for samples; token t of a file is t mod 50000."""
    for number, case in enumerate(sample_inputs()):
        prefix = folder / f"samples{number}"
        lengths = lengths_of(case["lengths"])
        ends = np.cumsum([0, *lengths])
        tokens = (np.arange(ends[-1]) % 50_000).tolist()
        pieces = [[tokens[a:b]] for a, b in pairwise(ends)]
        write(prefix, pieces, 50257)
        settings = config(
            random_seed=case["seed"], sequence_length=case["seq_length"], split=case["split"],
            blend=([str(prefix)], None),
        )  # fmt: skip
        datasets = built(megatron("gpt_dataset").GPTDataset, case["samples"], settings)
        names = ("train", "valid", "test")
        found = {n: one for n, one in zip(names, datasets, strict=True) if one is not None}
        yield case | {"found": {name: indices(one) for name, one in found.items()}}


def indices(dataset: Any) -> dict[str, Any]:
    picked = range(0, len(dataset), max(1, len(dataset) // 50))
    texts = [dataset._query_document_sample_shuffle_indices(k)[0] for k in picked]
    return {
        "range": [int(dataset.indices[0]), int(dataset.indices[-1]) + 1],
        "document": summary(dataset.document_index),
        "sample": summary(dataset.sample_index),
        "shuffle": summary(dataset.shuffle_index),
        "every": picked.step,
        "tokens": summary(np.array(texts, np.int64)),
    }


def blend_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """Blends of three small datasets, from the builder; samples given or not, weights given or not."""
    prefixes = []
    for number, length in enumerate((4000, 900, 2600)):
        prefixes.append(str(folder / f"blend{number}"))
        write(Path(prefixes[-1]), [[[1] * length]], 50257)
    cases: list[tuple[list[float] | None, int | None]] = [
        ([0.5, 0.3, 0.2], 100), ([30.0, 30.0, 40.0], 999), ([1.0, 1.0, 1.0], 50),
        ([0.1, 0.7, 0.3], 1000), ([1e-6, 2.0, 3.0], 400), (None, None), (None, 200), (None, 10**6),
    ]  # fmt: skip
    for weights, samples in cases:
        settings = config(
            random_seed=5, sequence_length=8, split="1,0,0", blend=(prefixes, weights)
        )
        blended = built(megatron("gpt_dataset").GPTDataset, [samples, 0, 0], settings)[0]
        yield {
            "weights": weights, "samples": samples, "sizes": [len(one) for one in blended.datasets],
            "made": [one.num_samples for one in blended.datasets],
            "dataset": summary(blended.dataset_index), "sample": summary(blended.dataset_sample_index),
        }  # fmt: skip


def long_blends() -> Iterator[dict[str, Any]]:
    """Blends of many datasets and samples, from the function that makes them; one in which a last bit of
    the weights, which are normalized twice, decides.
    """
    normalize, helpers = megatron("utils").normalize, megatron("helpers")
    wanted = megatron("blended_megatron_dataset_builder")._get_size_per_split_per_dataset
    cases = [([0.5, 0.8, 0.4, 0.7], 60)]
    for seed, count, samples in ((0, 2, 20_000), (1, 10, 50_000), (2, 37, 20_000)):
        cases.append((np.random.RandomState(seed).gamma(0.6, size=count).tolist(), samples))
    for weights, samples in cases:
        once = normalize(weights)
        shares = [row[0] for row in wanted(once, [samples])]
        datasets, own = np.zeros(sum(shares), np.int16), np.zeros(sum(shares), np.int64)
        helpers.build_blending_indices(
            datasets, own, normalize(once), len(weights), sum(shares), False
        )
        made = [row[0] for row in wanted(once, [samples], surplus=0.005)]
        yield {
            "weights": weights, "samples": samples, "sizes": None, "made": made,
            "dataset": summary(datasets), "sample": summary(own),
        }  # fmt: skip


def item_documents(file: int) -> list[list[list[int]]]:
    """Documents of file 0, 1 or 2, of 1 to 13 tokens, the last of each the end of document."""
    return [
        [[*(file * 1000 + n * 13 + k for k in range(n * (file + 3) % 13)), Tokenizer.eod]]
        for n in range(40 + 10 * file)
    ]


def item_cases(folder: Path) -> Iterator[dict[str, Any]]:
    """All items of each split, of --data-path, or of one path for each split, by the builder."""
    for file in range(3):
        write(folder / f"items{file}", item_documents(file), 50257)
    masks = {"eod_mask_loss": True, "reset_position_ids": True}
    cases: list[dict[str, Any]] = [
        {"data": [None, [0]], "flags": masks},
        {"data": [None, [0]], "flags": {"eod_mask_loss": True}},
        {"data": [[0.3, 0.7], [0, 2]], "flags": {"reset_position_ids": True}},
        {"data": [[2.0], [1]], "flags": {}},
        {"per_split": [[None, [0]], [None, [2]], None], "flags": masks},
        {"per_split": [[[1.0, 3.0], [0, 2]], [[5.0], [1]], [None, [2]]], "flags": {}},
    ]
    for case in cases:
        paths = {"split": "80,15,5", "blend": _blend(folder, case["data"])} if "data" in case else {
            "blend_per_split": [_blend(folder, one) for one in case["per_split"]]
        }  # fmt: skip
        settings = config(random_seed=5, sequence_length=7, **paths, **case["flags"])
        made = built(megatron("gpt_dataset").GPTDataset, [90, 20, 4], settings)
        yield case | {"items": [one and item_summary(list(one)) for one in made]}


def _blend(folder: Path, case: Any) -> Any:
    return case and ([str(folder / f"items{file}") for file in case[1]], case[0])


def item_summary(items: Any) -> dict[str, Any]:
    """What a model gets of them, in the types that it gets them in."""
    names = ("tokens", "labels", "loss_mask", "position_ids")
    return {name: summary(np.stack([np.asarray(item[name]) for item in items])) for name in names}


def path_cases() -> Iterator[dict[str, Any]]:
    parse = megatron("utils").get_blend_from_list
    for given in (["a"], ["a", "b"], [" a ", "b ", "c"], ["30", "a", "7.5", "b"], ["1", "2", "3"]):
        yield {"values": given, "parsed": parse(given)}


def golden() -> str:
    """The text of the file."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        found: dict[str, Any] = {
            "indexed": list(indexed_cases(folder)),
            "merged": merged(folder),
            "splits": list(split_cases()),
            "samples": list(sample_cases(folder)),
            "blends": [*blend_cases(folder), *long_blends()],
            "paths": list(path_cases()),
            "items": list(item_cases(folder)),
        }
    lines = []
    for name, cases in found.items():
        rows = cases if isinstance(cases, list) else [cases]
        lines.append(f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(golden())

"""What Megatron's preprocess_data.py does with --workers N, of megatron-core's own parts: a pool that takes 32
lines at a time, each document encoded by itself and sent back as a list, one builder that writes.

INPUT PREFIX VOCAB MERGES WORKERS; imports nothing of ours. Prints the seconds, startup left out as there.
"""

import importlib
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

_encode: list[Callable[[str], list[int]]] = []
_eod: list[int] = []
"""Of this process."""


def initialize(vocab: str, merges: str) -> None:
    with open(vocab, encoding="utf-8") as file:
        _eod.append(json.load(file)["<|endoftext|>"])
    try:
        made: Any = importlib.import_module("transformers").GPT2TokenizerFast(vocab, merges)
    except ImportError:
        bare: Any = importlib.import_module("tokenizers").ByteLevelBPETokenizer(vocab, merges)
        _encode.append(lambda text: list(bare.encode(text).ids))
    else:
        _encode.append(lambda text: list(made.convert_tokens_to_ids(made.tokenize(text))))


def of_line(line: str) -> tuple[list[int], int]:
    ids = _encode[0](json.loads(line)["text"])
    if ids:
        ids.append(_eod[0])
    return ids, len(line)


def main() -> None:
    source, prefix, vocab, merges, workers = sys.argv[1:]
    warnings.simplefilter("ignore")
    indexed: Any = importlib.import_module("megatron.core.datasets.indexed_dataset")
    builder = indexed.IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=indexed.DType.optimal_dtype(50257)
    )
    with open(source, encoding="utf-8") as file:
        pool = multiprocessing.Pool(int(workers), initialize, (vocab, merges))
        encoded = pool.imap(of_line, file, 32)
        began = time.monotonic()
        for ids, _ in encoded:
            builder.add_document(ids, [len(ids)] if ids else [])
    builder.finalize(f"{prefix}.idx")
    print(time.monotonic() - began)
    pool.close()
    pool.join()


if __name__ == "__main__":
    main()

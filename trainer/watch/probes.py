"""Texts whose probability is looked at as training goes on: `--probe-file`. Pure but for reading it.

A JSON object a line: {"prompt": "Paris is the capital of", "continuation": " France"} tells the continuation's
log probability and probability, {"text": "..."} the text's perplexity; {"name": ...} names either.

Probes are samples of a dataset, so they are run like an evaluation's: one batch, in which each is a leaf of its
own, so that a leaf's mean loss is the probe's. Shapes: S positions, n probes, b rows of a leaf.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.proto.errors import UsageError
from elastic.trainer.watch.console import perplexity

Encode = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""Texts to their tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A text and the part of it that is looked at."""

    name: str
    prompt: str
    """Empty for a whole text."""
    text: str
    """What follows on the prompt."""
    is_text: bool
    """Perplexity is told, not probability."""


def read(path: Path) -> list[Probe]:
    """Raises UsageError, which names the line."""
    try:
        # Not by splitlines: JSON may have other ends of lines in it.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--probe-file {path} cannot be read: {error}") from error
    found = [
        _parsed(f"--probe-file {path}, line {number}", number, line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise UsageError(f"--probe-file {path} has no probes")
    names = [probe.name for probe in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--probe-file {path} has two probes called {min(twice)}")
    return found


def _parsed(where: str, number: int, line: str) -> Probe:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: no JSON: {error}") from error
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
        raise UsageError(f"{where}: an object of strings is wanted")
    keys = set(given) - {"name"}
    if keys not in ({"prompt", "continuation"}, {"text"}):
        raise UsageError(
            f'{where}: give "prompt" and "continuation", or "text"; "name" with either'
        )
    text = given.get("text", given.get("continuation", ""))
    if not text:
        raise UsageError(f"{where}: the text is empty")
    return Probe(
        name=given.get("name", f"line-{number}"),
        prompt=given.get("prompt", ""),
        text=text,
        is_text="text" in given,
    )


class ProbeSet:
    """Probes as samples, tokenized once. Those from the n-th on have a mask of zeros: they fill up leaves.

    Leaf i of `Leaves(batch_size=len(probe_set), leaf_size=b)` has samples i, i + n, ..., so probe i alone.
    """

    def __init__(
        self, probes: Sequence[Probe], encode: Encode, *, eod: int, seq_length: int, leaf_size: int
    ) -> None:
        """eod: the token between documents, which stands before each probe.

        Raises UsageError for a probe that is longer than a sequence.
        """
        self._probes = list(probes)
        rows = len(self._probes) * leaf_size
        self._ids = np.full((rows, seq_length + 1), eod, np.int64)
        self._mask = np.zeros((rows, seq_length), np.float32)
        for row, probe in enumerate(self._probes):
            before, after = _tokens(probe, encode)
            ids = [*before, *after]
            if len(ids) > seq_length:
                raise UsageError(
                    f"probe {probe.name} has {len(ids)} tokens, and a sequence {seq_length}: cut it"
                )
            self._ids[row, 1 : len(ids) + 1] = ids
            self._mask[row, len(before) : len(ids)] = 1

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: int) -> dict[str, NDArray[np.generic]]:
        """`tokens`, `labels`, `loss_mask` and `position_ids`, [S] each, and `dataset_id`, []."""
        return {
            "tokens": self._ids[row, :-1],
            "labels": self._ids[row, 1:],
            "loss_mask": self._mask[row],
            "position_ids": np.arange(self._mask.shape[1], dtype=np.int64),
            "dataset_id": np.int64(0),
        }

    def results(self, means: Sequence[float]) -> dict[str, dict[str, float]]:
        """What each probe came to by name, from the mean loss of its tokens, [n]."""
        found = {}
        for probe, mean, mask in zip(self._probes, means, self._mask, strict=False):
            if probe.is_text:
                found[probe.name] = {"perplexity": perplexity(mean)}
            else:
                log = -mean * float(mask.sum())
                found[probe.name] = {"log-probability": log, "probability": math.exp(log)}
        return found


def scalars(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """TensorBoard's tags: `probe NAME probability`."""
    return {
        f"probe {name} {what}": value
        for name, told in results.items()
        for what, value in told.items()
    }


def _tokens(probe: Probe, encode: Encode) -> tuple[list[int], list[int]]:
    """Of prompt and text: as they are in one piece, where that has the prompt's tokens as they are."""
    texts = probe.prompt, probe.prompt + probe.text, probe.text
    before, whole, after = (list(ids) for ids in encode(texts))
    if whole[: len(before)] == before and len(whole) > len(before):
        after = whole[len(before) :]
    return before, after

import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from elastic.data import Leaves
from elastic.proto.errors import UsageError
from elastic.trainer.watch import probes
from elastic.trainer.watch.probes import ProbeSet

EOD = 0


def encode(texts: Sequence[str]) -> list[list[int]]:
    """A token a character, and one for `ab`."""
    return [
        [1 if piece == "ab" else ord(piece) for piece in re.findall("ab|.", text)] for text in texts
    ]


def file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "probes.jsonl"
    path.write_text("\n".join(lines))
    return path


LINES = (
    '{"name": "paris", "prompt": "xy", "continuation": "zw"}',
    "",
    '{"text": "abc"}',
    '{"prompt": "a", "continuation": "bc"}',
)


def test_probes_are_masked_samples_behind_an_end_of_document(tmp_path: Path) -> None:
    found = ProbeSet(
        probes.read(file(tmp_path, *LINES)), encode, eod=EOD, seq_length=6, leaf_size=2
    )
    leaves = Leaves(batch_size=len(found), leaf_size=2).of(0, 0, 1)
    assert [leaf.places.tolist() for leaf in leaves] == [[0, 3], [1, 4], [2, 5]]
    rows = [found[row] for row in range(6)]
    x, y, z, w, a, b, c = map(ord, "xyzwabc")
    assert [row["tokens"].tolist() for row in rows[:3]] == [
        [EOD, x, y, z, w, EOD], [EOD, 1, c, EOD, EOD, EOD], [EOD, a, b, c, EOD, EOD],
    ]  # fmt: skip
    assert [row["labels"].tolist()[:4] for row in rows[:2]] == [[x, y, z, w], [1, c, EOD, EOD]]
    assert [row["loss_mask"].tolist() for row in rows] == [
        [0, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0], *[[0] * 6] * 3,
    ]  # fmt: skip
    assert rows[0]["loss_mask"].dtype == np.float32
    assert rows[0]["position_ids"].tolist() == list(range(6))


def test_losses_become_probabilities_and_perplexities(tmp_path: Path) -> None:
    found = ProbeSet(
        probes.read(file(tmp_path, *LINES)), encode, eod=EOD, seq_length=6, leaf_size=1
    )
    results = found.results([1.0, math.log(8), 0.25])
    assert results == {
        "paris": {"log-probability": -2.0, "probability": pytest.approx(math.exp(-2))},
        "line-3": {"perplexity": pytest.approx(8.0)},
        "line-4": {"log-probability": -0.5, "probability": pytest.approx(math.exp(-0.5))},
    }
    assert probes.scalars(results)["probe paris log-probability"] == -2.0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no JSON"),
        pytest.param("[" * 200_000, "line 2: no JSON: maximum recursion", id="too deep"),
        ('["text"]', "line 2: an object of strings"),
        ('{"text": 3}', "line 2: an object of strings"),
        ('{"prompt": "a"}', 'line 2: give "prompt" and "continuation"'),
        ('{"text": "a", "prompt": "b"}', 'line 2: give "prompt" and "continuation"'),
        ('{"prompt": "a", "continuation": ""}', "line 2: the text is empty"),
        ('{"text": "b", "name": "a"}', "two probes called a"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = file(tmp_path, '{"name": "a", "text": "b"}', line)
    with pytest.raises(UsageError, match=said):
        probes.read(path)


def test_a_text_may_have_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    (probe,) = probes.read(file(tmp_path, '{"text": "a\u2028b\x85c"}'))
    assert probe.text == "a\u2028b\x85c"


def test_bad_files_and_long_probes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        probes.read(tmp_path / "none")
    with pytest.raises(UsageError, match="has no probes"):
        probes.read(file(tmp_path, "", " "))
    long = probes.read(file(tmp_path, '{"text": "xxxxxxx"}'))
    with pytest.raises(UsageError, match="probe line-1 has 7 tokens, and a sequence 6"):
        ProbeSet(long, encode, eod=EOD, seq_length=6, leaf_size=1)

"""The corpus is what it says: enough cases, well formed, and split before anybody fits to it."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.master.diagnosis import corpus
from tests.master.diagnosis.corpus import FOLDER, LABELS, SIDES, Case, CorpusError, Side, load


@pytest.fixture(scope="module")
def sides() -> dict[Side, tuple[Case, ...]]:
    return {side: load(side) for side in SIDES}


@pytest.fixture(scope="module")
def cases(sides: dict[Side, tuple[Case, ...]]) -> list[Case]:
    return [case for side in SIDES for case in sides[side]]


def test_there_are_enough_cases_and_each_has_an_id_of_its_own(cases: list[Case]) -> None:
    assert len(cases) >= 200
    assert [id_ for id_, count in Counter(c.id for c in cases).items() if count > 1] == []


def test_every_label_has_cases_on_both_sides(sides: dict[Side, tuple[Case, ...]]) -> None:
    for side in SIDES:
        counts = Counter(case.label for case in sides[side])
        assert set(LABELS) - set(counts) == set(), f"labels without a case in {side}"


def test_the_halves_are_those_of_the_split(sides: dict[Side, tuple[Case, ...]]) -> None:
    labels = {case.id: case.label for side in SIDES for case in sides[side]}
    assert {case.id for case in sides["held_out"]} == corpus.split(labels)
    known, held = len(sides["known"]), len(sides["held_out"])
    assert abs(known - held) <= len(LABELS) // 2, f"{known} known, {held} held out"


def test_in_half_of_the_cases_of_several_the_first_to_report_is_not_the_culprit(
    cases: list[Case],
) -> None:
    told = [case.culprit_is_first for case in cases if case.culprit_is_first is not None]
    assert len(told) >= 100
    later = told.count(False) / len(told)
    assert 0.5 <= later <= 0.7, f"{later:.2f} of {len(told)}"


def test_no_case_tells_where_it_was_recorded() -> None:
    for path in FOLDER.glob("*/*.jsonl"):
        found = re.findall(
            r"/tmp/w/|(?<!\w)/work/|/root/|process_api|/tmp/record-", path.read_text()
        )
        assert not found, f"{path.name}: {sorted(set(found))}"


def test_the_readme_counts_and_explains_every_label(sides: dict[Side, tuple[Case, ...]]) -> None:
    text = (FOLDER / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    counts = [Counter(case.label for case in sides[side]) for side in SIDES]
    wanted = [(name, text, *(str(c[name]) for c in counts)) for name, text in LABELS.items()]
    assert rows == wanted


GOOD = {
    "id": "x",
    "label": "crash",
    "culprit": {"node_id": "node-0", "rank": 0},
    "source": "recorded: by hand",
    "failures": [
        {
            "node_id": "node-0", "at": 1.0, "rank": 0, "local_rank": 0, "exit_code": -11,
            "error_type": "", "message": "", "frame": "", "log_tail": "", "oom_killed": False,
            "what": "rank",
        }
    ],
    "hosts": {"node-0": {"kernel_log": [], "container_exit": None}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": "gremlins"}, "no such label"),
        ({"source": "somebody said so"}, "no source"),
        ({"culprit": {"node_id": "node-7", "rank": 0}}, "none of its hosts"),
        ({"failures": []}, "nothing was heard"),
        ({"mood": "bad"}, "too many"),
    ],
)
def test_a_case_that_is_none_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    (tmp_path / "known").mkdir()
    file = tmp_path / "known" / "crash.jsonl"
    file.write_text(json.dumps(GOOD) + "\n")
    assert [case.id for case in load("known", tmp_path)] == ["x"]
    file.write_text(json.dumps(GOOD | change) + "\n")
    with pytest.raises(CorpusError, match=said):
        load("known", tmp_path)

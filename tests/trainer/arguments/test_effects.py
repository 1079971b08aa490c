"""Every accepted argument changes what a run does, or has no effect and says so.

`observed.py` runs tiny runs and looks at them from outside: what is compared are tensors, counts and bytes.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elastic.trainer.arguments.options import flag_of
from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings, subjects
from elastic.trainer.arguments.unused import UNUSED
from tests.trainer.arguments.effects import BEGINS_ILL, ELSEWHERE, ENDS_ILL, SHOWN, SPLIT
from tests.trainer.arguments.observed import SAVED, words_of

pytestmark = pytest.mark.xdist_group("effects")  # one process for all of them

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 100 --lr 0.1"
)
DATA = "--mock-data --vocab-size 100"
ROOT = Path(__file__).parents[3]
Seen = dict[str, Any]
Runs = Callable[..., Sequence[Seen]]
ROPE = "--position-embedding-type rope"
TIMED = {"text", "board", "timed", "profiled"}
"""Views with times in them, which are left out."""
EVALUATED = "--train-iters 5 --eval-interval 2 --eval-iters 3"


def run(*more: str) -> Settings:
    return parse(" ".join((BASE, DATA, *more)).split())


def all_runs() -> list[tuple[int, int, str]]:
    """World, rank and arguments; those that an argument is beside twice, if only once for most views."""
    viewed: set[str] = set()
    asked: list[tuple[int, int, str]] = [(1, 0, SAVED)]  # which others begin from
    for one in SHOWN.values():
        beside = (one.world, one.rank, one.beside)
        views = set(one.views.split())
        asked += [beside] * ((2 if views - viewed else 1) - asked.count(beside))
        viewed |= views - TIMED
        asked.append((*beside[:2], f"{one.beside} {one.more}"))
    more = (EVALUATED, f"{SPLIT} {ROPE}", f"{SPLIT} {ROPE} --reset-position-ids")
    return [*asked, *((1, 0, said) for said in more)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What is seen of the runs with the same arguments."""
    base = tmp_path_factory.mktemp("runs")
    asked = all_runs()
    (base / "runs.json").write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.arguments.observed", base / "runs.json", base / "seen.json"],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[tuple[int, int, str], list[Seen]] = {}
    for one, seen in zip(asked, json.loads((base / "seen.json").read_text()), strict=True):
        found.setdefault(one, []).append(seen)
    return lambda said, world=1, rank=0: found[world, rank, said]


@pytest.mark.soak
@pytest.mark.parametrize("name", SHOWN)
def test_an_argument_changes_what_a_run_does(name: str, runs: Runs) -> None:
    views, beside, more, world, rank = SHOWN[name]
    before, *again = runs(beside, world, rank)
    (changed,) = runs(f"{beside} {more}", world, rank)[:1]
    assert (before["status"] == 0) == (name not in BEGINS_ILL), before["all"]
    assert (changed["status"] == 0) == (name not in ENDS_ILL), changed["all"]
    for view in views.split():
        assert all(before.get(view) == one.get(view) for one in again), f"{view} differs by itself"
        assert before.get(view) != changed.get(view), f"{more} changes nothing of its {view}"


@pytest.mark.soak
def test_an_evaluation_reads_what_comes_next(runs: Runs) -> None:
    """Three batches of four after every second step and at the end, and then of the test set."""
    seen = runs(EVALUATED)[0]
    read = [sorted(one) for one in seen["evaluated"]]
    assert read == [[*range(first, first + 4)] for first in (*range(0, 36, 4), 0, 4, 8)]
    assert seen["asked"] == [20, 36, 12]
    assert seen["readers"] == [[False, 2], *[[True, 2]] * 4], "by whom: threads of each"


@pytest.mark.soak
def test_a_set_is_read_whole_or_by_so_many_threads_where_that_is_asked_for(runs: Runs) -> None:
    beside = SHOWN["full_validation"].beside
    read = runs(f"{beside} --full-validation")[0]["evaluated"]
    assert [sorted(one) for one in read] == [
        [*range(first, first + 4)] for first in (*range(0, 64, 4),) * 3 + (0,)
    ]
    readers = runs(f"{beside} --num-workers 3")[0]["readers"]
    assert readers == [[False, 3], *[[True, 3]] * 4]


@pytest.mark.soak
def test_samples_are_trained_on_in_the_plans_order(runs: Runs) -> None:
    seen = runs("")[0]
    assert [sorted(one) for one in seen["trained"]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.soak
def test_rotary_positions_are_never_reset_and_that_is_said(runs: Runs) -> None:
    before, after = (runs(f"{SPLIT} {ROPE}{more}")[0] for more in ("", " --reset-position-ids"))
    assert before["losses"] == after["losses"]
    said = "--reset-position-ids has no effect: as in Megatron, only"
    assert said in after["all"]
    assert said not in before["all"]


@pytest.mark.parametrize("name", UNUSED)
def test_what_has_no_effect_changes_nothing_and_is_said(name: str) -> None:
    one = UNUSED[name]
    for flag in one.flags(name):
        said = f"{flag} {(one.only or ('w',))[0]}" if one.words else flag
        found = run(said)
        assert [note for note in found.notes if one.why in note]
        assert {kind: getattr(found, kind) for kind in subjects()} == {
            kind: getattr(run(), kind) for kind in subjects()
        }


def test_every_argument_is_in_one_of_the_tables() -> None:
    accepted = {one.name for kind in subjects().values() for one in fields(kind)}
    assert accepted - {*SHOWN, *ELSEWHERE} == set(), "say in effects.py what shows their effect"
    assert {*SHOWN, *ELSEWHERE} - accepted == set(), "these are no arguments"
    assert SHOWN.keys().isdisjoint(ELSEWHERE), "one table is enough"


def test_an_entry_gives_its_argument() -> None:
    for kind in subjects().values():
        for one in fields(kind):
            off = one.metadata.get("off", ()) or (flag_of(f"no_{one.name}"),)
            flags = {flag_of(one.name), *off}
            assert one.name in ELSEWHERE or flags & set(SHOWN[one.name].more.split()), one.name


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_test_elsewhere_gives_the_argument(name: str) -> None:
    file, _, test = ELSEWHERE[name].partition("::")
    assert any(flag_of(name) in one for one in words(ROOT / "tests" / "trainer" / file, test))


def words(file: Path, test: str) -> list[str]:
    """All text in a test, and in what of its module it names."""
    body = ast.parse(file.read_text()).body
    constants = {
        target.id: one.value
        for one in body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    (found,) = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == test)
    named = {one.id for one in ast.walk(found) if isinstance(one, ast.Name)}
    read = [found, *(constants[one] for one in named & constants.keys())]
    return [
        str(one.value) for tree in read for one in ast.walk(tree) if isinstance(one, ast.Constant)
    ]


def test_another_spelling_means_the_same() -> None:
    for kind in subjects().values():
        for one in fields(kind):
            flag = flag_of(one.name)
            if one.metadata.get("also"):
                said = words_of(
                    f"{BASE} {DATA} {SHOWN[one.name].beside} {SHOWN[one.name].more}", ROOT
                )
                said = [word for word in said if word != "COUNTED"]
                for other in one.metadata["also"]:
                    assert parse(said) == parse([other if word == flag else word for word in said])
            for other, value in one.metadata.get("meaning", {}).items():
                fused = "--attention-dropout 0"
                assert run(fused, other) == run(fused, f"{flag} {value}") != run(fused)
            for other in one.metadata.get("off", ()):
                assert run(other) == run(f"{flag} false") != run()

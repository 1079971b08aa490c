"""Replicas that hold the same are never called different; a wrong bit is seen, and its rank named."""

from typing import Any

import pytest

from elastic.trainer.run.replicas import note
from tests.trainer import forks
from tests.trainer.run.corrupted import CASES, SIZES, STEPS, UP, WORD

pytestmark = pytest.mark.xdist_group("corrupted")  # one run for all of them

NAMED = {
    "odd dp3": [(1, 2, 3, UP)],
    "odd dp4": [(3, 3, 4, WORD)],
    "odd dp3-fast": [(0, 2, 3, UP)],
    "odd moments": [(2, 2, 3, f"{UP} exp_avg_sq")],
    "odd two of four": [(1, 3, 4, UP), (2, 3, 4, WORD)],
    "odd zero1": [(1, 2, 3, "embedding.positions")],
    "odd zero3": [(2, 2, 3, "embedding.positions")],
}
"""By case: rank, how many of how many hold something else, and of what."""
UNDECIDED = {
    "odd dp2": ([0, 1], UP),
    "odd dp2-tp2": ([1, 3], UP),
    "odd dp2-pp2": ([1, 3], "head.weight"),
    "half of four": ([0, 1, 2, 3], UP),
}
"""By case: who differs in what."""
UNSEEN = {"odd shard"}
"""What is wrong where it is kept once; a line at start says so."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return forks.told("tests.trainer.run.corrupted", tmp_path_factory.mktemp("corrupted"), SIZES)


def test_each_case_is_looked_at() -> None:
    spoiled = {name for name, case in CASES.items() if case.flips}
    assert spoiled == NAMED.keys() | UNDECIDED.keys() | UNSEEN


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.flips])
def test_replicas_are_the_same_behind_each_step(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert told[name] == [{"same": [*range(STEPS + 1)], "said": ""}] * SIZES[name]


@pytest.mark.parametrize("name", NAMED)
def test_who_holds_something_else_than_most_is_named_on_every_rank(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    said = heard(told[name])
    for rank, most, size, what in NAMED[name]:
        assert f"rank {rank} on " in said
        assert f"does not hold what {most} of {size} replicas hold of {what}" in said
    assert said.count("does not hold") == len(NAMED[name]), "nobody else is"


@pytest.mark.parametrize("name", UNDECIDED)
def test_without_a_majority_nobody_is_named(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    said, (ranks, what) = heard(told[name]), UNDECIDED[name]
    assert [rank for rank in range(SIZES[name]) if f"rank {rank} on " in said] == ranks
    assert f"differ in {what}: " in said
    assert "nobody can say" in said
    assert "does not hold" not in said


@pytest.mark.parametrize("name", UNSEEN)
def test_what_is_there_once_is_not_seen_and_that_is_said(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    assert {one["said"] for one in told[name]} == {""}
    assert "what that keeps wrongly is the same for all" in note(3, zero=CASES[name].layout.zero)


def test_one_replica_has_nobody_to_be_compared_with() -> None:
    assert "has no effect: there is one replica" in note(1, zero=0)


def heard(ranks: list[dict[str, Any]]) -> str:
    """The one thing that all ranks say, behind the second step, when all was well until the first."""
    (said,) = {one["said"] for one in ranks}
    assert [one["same"] for one in ranks] == [[0, 1]] * len(ranks)
    assert said.startswith("after step 2: ")
    assert "after step 1 all were the same" in said
    assert "the newest checkpoint to trust is that of step 1 or one before it" in said
    return str(said)

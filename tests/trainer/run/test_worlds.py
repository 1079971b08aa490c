"""In exact mode no number of replicas, and no schedule, changes a bit."""

import math
from typing import Any

import pytest

from tests.trainer import forks
from tests.trainer.run.worlds import ALIKE, OVERFLOWN, SIZES, STEPS, UNLIKE, WORLDS

pytestmark = pytest.mark.xdist_group("worlds")  # one run for all of them

FAST = 1e-4
"""Part of a loss, or of a norm, that worlds may differ by in fast mode."""


class Told:
    """What the ranks of each world ended with."""

    def __init__(self, ranks: dict[str, list[dict[str, Any]]]) -> None:
        self.ranks = ranks

    def steps(self, name: str) -> list[str]:
        """Loss and norm of each step, as all of its ranks have them."""
        ((*steps,),) = {tuple(one["steps"]) for one in self.ranks[name]}
        return steps

    def numbers(self, name: str) -> list[float]:
        """The same as numbers, one after the other."""
        return [float.fromhex(word) for step in self.steps(name) for word in step.split()]

    def parameters(self, name: str) -> dict[str, str]:
        """Digests, as all ranks that have a parameter have it."""
        found: dict[str, str] = {}
        for one in self.ranks[name]:
            for parameter, digest in one["parameters"].items():
                assert found.setdefault(parameter, digest) == digest, f"{name}: {parameter}"
        return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(forks.told("tests.trainer.run.worlds", tmp_path_factory.mktemp("worlds"), SIZES))


def test_each_world_is_compared_with_another() -> None:
    assert set.union(*ALIKE, OVERFLOWN, UNLIKE) == WORLDS.keys()


@pytest.mark.parametrize("alike", ALIKE, ids=lambda alike: min(alike))
def test_losses_norms_and_parameters_are_the_same_bits(told: Told, alike: set[str]) -> None:
    first, *others = sorted(alike)
    assert len(set(told.steps(first))) == STEPS, "it trains"
    for other in others:
        assert told.steps(other) == told.steps(first), other
        assert told.parameters(other) == told.parameters(first), other


def test_what_overflows_is_left_out_by_every_rank(told: Told) -> None:
    one, other, trained = (told.parameters(name) for name in (*OVERFLOWN, "fp16-dp1"))
    shared = one.keys() & other.keys()  # a pipeline's last stage has the tied weight as its own
    assert len(shared) > 20
    assert [name for name in shared if one[name] != other[name]] == [], "as both began"
    assert [name for name in shared if one[name] == trained[name]] == []
    for name in OVERFLOWN:
        norms = [float.fromhex(step.split()[1]) for step in told.steps(name)]
        assert not any(map(math.isfinite, norms)), name


def test_in_fast_mode_worlds_differ_by_rounding(told: Told) -> None:
    """Else nothing would be shown by what is the same. By no more than rounding, from exact mode as well."""
    one, other = sorted(UNLIKE)
    assert told.parameters(one) != told.parameters(other)
    exact = told.numbers("fp32-dp1")
    assert told.numbers(one) == pytest.approx(told.numbers(other), rel=FAST)
    assert told.numbers(one) == pytest.approx(exact, rel=FAST)


def test_each_rank_knows_what_its_time_went_to(told: Told) -> None:
    for name, ranks in told.ranks.items():
        for rank in ranks:
            wanted = {"forward", "backward", "reduce", "clip", "other"}
            assert {phase for phase, took in rank["phases"].items() if took} == wanted, name


def test_blocks_have_one_graph_between_them(told: Told) -> None:
    """And so have the loss and the norm's squares; rounding has one for vectors and one for matrices."""
    compiled = {name for name, world in WORLDS.items() if world.layout.compile}
    assert compiled
    for name, ranks in told.ranks.items():
        assert {one["graphs"] for one in ranks} == {5 if name in compiled else 0}, name


@pytest.mark.parametrize("name", ["pp2-dp2", "frozen-pp2-dp1"])
def test_what_is_tied_over_stages_stays_the_same(told: Told, name: str) -> None:
    found = told.parameters(name)
    assert found["head.weight"] == found["embedding.words.weight"]

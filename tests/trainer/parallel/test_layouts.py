"""Every layout computes what one process computes."""

from typing import Any

import pytest

from tests.trainer import forks
from tests.trainer.model.shapes import ALL
from tests.trainer.parallel.layouts import CASES, SIZES

pytestmark = pytest.mark.xdist_group("layouts")  # one run for all of them


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout found."""
    return forks.told("tests.trainer.parallel.layouts", tmp_path_factory.mktemp("layouts"), SIZES)


@pytest.mark.parametrize("name", CASES)
def test_loss_norm_and_gradients_are_those_of_one_process(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    seen: set[str] = set()
    for found in told[name]:
        assert found["loss"] < 1e-6
        assert found["norm"] < 1e-6
        assert {name: off for name, off in found["gradients"].items() if not off < 1e-5} == {}
        seen.update(found["gradients"])
    blocks = {name.split(".")[1] for name in seen if name.startswith("blocks.")}
    assert blocks == {str(number) for number in range(ALL[CASES[name].shape].num_layers)}


@pytest.mark.parametrize("name", CASES)
def test_a_block_makes_two_all_reduces_or_two_pairs(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    layout = CASES[name].layout
    wanted = {} if layout.tp == 1 else {"all_reduce": 2}
    if layout.sequence:
        wanted = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert [found["collectives"] for found in told[name]] == [wanted] * SIZES[name]

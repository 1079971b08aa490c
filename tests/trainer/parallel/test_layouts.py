"""Every layout computes what one process computes."""

from typing import Any

import pytest

from tests.trainer import forks
from tests.trainer.model.shapes import ALL
from tests.trainer.parallel.layouts import CASES, SIZES

SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}  # fmt: skip
pytestmark = pytest.mark.xdist_group("layouts")  # one run for all of them


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout found."""
    return forks.told("tests.trainer.parallel.layouts", tmp_path_factory.mktemp("layouts"), SIZES)


@pytest.mark.parametrize("name", CASES)
def test_loss_norm_gradients_and_evaluation_are_those_of_one_process(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    seen: set[str] = set()
    for found in told[name]:
        assert found["loss"] < 1e-6
        assert found["norm"] < 1e-6
        assert found["evaluation"] < 1e-6
        assert {name: off for name, off in found["gradients"].items() if not off < 1e-5} == {}
        seen.update(found["gradients"])
    blocks = {name.split(".")[1] for name in seen if name.startswith("blocks.")}
    assert blocks == {str(number) for number in range(ALL[CASES[name].shape].num_layers)}


@pytest.mark.parametrize("name", CASES)
def test_numbers_over_all_parameters_count_each_once(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    zeros: dict[str, int] = {}
    for found in told[name]:
        assert found["params"] < 1e-6
        zeros |= found["zeros of each"]
    if CASES[name].layout.pp > 1 and ALL[CASES[name].shape].tied:
        del zeros["head.weight"]
    assert {found["zeros"] for found in told[name]} == {float(sum(zeros.values()))}


@pytest.mark.parametrize("name", CASES)
def test_a_block_makes_two_all_reduces_or_two_pairs(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    layout = CASES[name].layout
    wanted = {} if layout.tp == 1 else {"all_reduce": 2}
    if layout.sequence:
        wanted = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert [found["collectives"] for found in told[name]] == [wanted] * SIZES[name]


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_is_what_runs(told: dict[str, list[dict[str, Any]]], name: str) -> None:
    layout = CASES[name].layout
    for found in told[name]:
        assert found["kernel"] == [layout.attention or "flash"]
        wanted = [SCHEDULES[layout.schedule]] * 2 if layout.pp > 1 else []
        assert found["schedules"] == wanted, "one for training and one for evaluation"


@pytest.mark.parametrize("name", CASES)
def test_what_overflows_on_one_rank_is_seen_by_all(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    alone = CASES[name].layout.zero > 0  # else all replicas have it
    assert [found["overflow is seen"] for found in told[name]] == [alone] * SIZES[name]


@pytest.mark.parametrize(("zero", "reduced", "gathered", "scattered"), [(0, 1, 0, 0), (1, 0, 1, 1), (2, 0, 1, 2), (3, 0, 4, 2)])  # fmt: skip
def test_what_zero_moves_in_a_step_of_two_leaves(
    told: dict[str, list[dict[str, Any]]], zero: int, reduced: int, gathered: int, scattered: int
) -> None:
    """Of each parameter. An all-reduce moves what a gather and a scatter do: with one leaf a step that is once,
    once, once and one and a half times as much, as ZeRO's paper has it; with more, only 0 and 1 stay at that."""
    for found in told["gpt2-dp2-fast" if zero == 1 else f"gpt2-dp2-zero{zero}"]:
        moved = [found["traffic"].get(name, 0.0) for name in ("allreduce_", "_allgather_base_", "_reduce_scatter_base_")]  # fmt: skip
        assert moved == pytest.approx([reduced, gathered, scattered], abs=0.02)


FUSED = [
    name for name, (shape, _, layout) in CASES.items()
    if shape == "gpt2" and (layout.pp, layout.attention) == (1, None) and layout.zero < 3
]  # fmt: skip
"""Where what is kept is told from weights, which ZeRO 3 lets go of."""


@pytest.mark.parametrize("name", FUSED)
def test_a_block_keeps_what_the_formula_says(
    told: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """Shared out over ranks that share layers; under sequence parallelism the residual stream, too."""
    for found in told[name]:
        assert found["kept"] == pytest.approx(1, abs=0.02)

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.footprint import footprint
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.parallel.order import order
from tests.trainer.forks import told
from tests.trainer.parallel.footprints import CASES, IN_BF16, PIPELINES, SIZES

pytestmark = pytest.mark.xdist_group("footprint")  # one run for all of them

GPT_1B = GPTConfig(
    num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50304
)
ONE = Grid(dp=1, pp=1, tp=1)


def _told(factory: pytest.TempPathFactory, kind: str) -> dict[str, list[Any]]:
    return told("tests.trainer.parallel.footprints", factory.mktemp(kind), SIZES[kind], kind)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return _told(tmp_path_factory, "whole")


Ranks = Callable[[str], list[Any]]
NAMES = [pytest.param(name, marks=pytest.mark.soak) for name in (*PIPELINES, *IN_BF16)]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What the ranks of a pipeline found; those in bf16 run where one of them is wanted."""
    ran = functools.cache(functools.partial(_told, tmp_path_factory))
    return lambda name: ran("in bf16" if name in IN_BF16 else "pipelines")[name]


@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_within_4_percent_of_the_peak(whole: dict[str, Any], name: str) -> None:
    (one,) = whole[name]
    assert one["formula"] == pytest.approx(one["peak"], rel=0.04)


@pytest.mark.parametrize("name", NAMES)
def test_so_it_is_of_each_rank_of_a_pipeline(pipelines: Ranks, name: str) -> None:
    assert len(pipelines(name)) == 2
    for one in pipelines(name):
        assert one["formula"] == pytest.approx(one["peak"], rel=0.04)


@pytest.mark.parametrize("name", NAMES)
def test_passes_are_in_the_order_that_torch_runs_them_in(pipelines: Ranks, name: str) -> None:
    layout = (PIPELINES | IN_BF16)[name].layout
    for rank, one in enumerate(pipelines(name)):
        said = order(layout.schedule, rank=rank, pp=2, virtual=layout.virtual, leaves=4)
        ran = [tuple(a_pass) for a_pass in one["passes"]]
        assert ran[-len(said) :] == [(a_pass.kind, a_pass.stage, a_pass.leaf) for a_pass in said]


@pytest.mark.parametrize(("exact", "peak"), [(True, 56.471024128e9), (False, 51.208813056e9)])
def test_what_an_h200_had_at_the_most(exact: bool, peak: float) -> None:
    """As in docs/benchmarks/2026-11-23-h200-trainer/mfu-5-flex.jsonl: 1.3B, compiled, 8 leaves of 8 samples."""
    layout = Layout(exact=exact, compile=True)
    said = footprint(GPT_1B, layout, ONE, Place(0, 0, 0), leaf_size=8, leaves=8)
    assert said.total == pytest.approx(peak, rel=0.01)


def test_what_is_shared_out_is_counted_once() -> None:
    def total(layout: Layout, dp: int = 1) -> float:
        grid = Grid(dp=dp, pp=layout.pp, tp=layout.tp)
        places = [Place(0, stage, 0) for stage in range(layout.pp)]
        every = [footprint(GPT_1B, layout, grid, at, leaf_size=1, leaves=4) for at in places]
        return sum(one.optimizer for one in every) * layout.tp * (dp if layout.zero else 1)

    whole = total(Layout())
    assert total(Layout(tp=2)) == pytest.approx(whole, rel=0.01)
    assert total(Layout(zero=3), dp=4) == pytest.approx(whole, rel=0.001)
    tied = 8 * GPT_1B.vocab_size * GPT_1B.hidden_size  # both ends have them
    assert total(Layout(pp=2)) == pytest.approx(whole + tied, rel=0.001)
    assert total(Layout(zero=0), dp=4) == whole


@pytest.mark.parametrize(
    ("zero", "paper", "ours"), [(0, 120, 135), (1, 31.4, 46.4), (2, 16.6, 16.9), (3, 1.9, 3.1)]
)
def test_the_table_of_the_zero_paper(zero: int, paper: float, ours: float) -> None:
    """GB of 7.5B parameters on 64 ranks, as docs/trainer.md has them: gradients are fp32 here, 2 bytes more each. So
    they are with ZeRO 3, which keeps no second copy of the parameters, but what it has gathered is counted."""
    config = replace(GPT_1B, num_layers=36, hidden_size=4096, num_attention_heads=32)
    count, ranks = config.parameter_count, 64
    grid, layout = Grid(dp=ranks, pp=1, tp=1), Layout(zero=zero, exact=False)
    one = footprint(config, layout, grid, Place(0, 0, 0), leaf_size=1, leaves=4)
    found = one.parameters + one.optimizer + one.gradients
    whole = (16, 4, 2, 0)[zero]
    said = count * (whole + (16 - whole) / ranks)
    wider = count * (2, 2, 2 / ranks, 0)[zero]
    hidden = config.hidden_size
    ends = (config.vocab_size + config.positions + 2) * hidden
    gathered = 2 * (ends + 2 * (12 * hidden + 13) * hidden) if zero == 3 else 0
    assert found == pytest.approx(said + wider + gathered, rel=1e-4)
    assert said / count * 7.5 == pytest.approx(paper, abs=0.05)
    assert found / count * 7.5 == pytest.approx(ours, abs=0.05)


@pytest.mark.parametrize("virtual", [1, 2])
def test_the_zero_bubble_schedule_keeps_as_much_on_each_rank(virtual: int) -> None:
    """Who waits less for the first backward waits longer with the weights."""
    for rank in range(4):
        alive = most = 0
        for one in order("zero-bubble", rank=rank, pp=4, virtual=virtual, leaves=16):
            alive += {"forward": 1, "inputs": 0, "weights": -1}[one.kind]
            most = max(most, alive)
        assert most == 4 * virtual


def test_a_pipeline_keeps_what_is_under_way() -> None:
    def kept(stage: int, leaves: int, **how: Any) -> int:
        layout = Layout(pp=4, **how)
        grid, place = Grid(dp=1, pp=4, tp=1), Place(0, stage, 0)
        return footprint(GPT_1B, layout, grid, place, leaf_size=1, leaves=leaves).activations

    leaf, sent = kept(2, 16) // 2, 2 * GPT_1B.seq_length * GPT_1B.hidden_size
    blocks = leaf - sent
    assert [kept(stage, 16) for stage in range(3)] == [4 * leaf, 3 * leaf, 2 * leaf]
    # All sixteen, then fifteen beside the first one's gradients, which weigh more than a leaf.
    assert kept(0, 16, schedule="gpipe") == 15 * leaf
    chunk = blocks // 2 + sent
    assert kept(0, 16, schedule="interleaved", virtual=2) == (6 + 4 + 1) * chunk
    # One of them has had its backward for what came in, and waits with what that came from.
    assert kept(0, 16, schedule="zero-bubble") == 4 * leaf + sent

"""What stages wait for one another, in the order in which they run leaves (`test_order.py`: torch's), if each
takes as long as another."""

from functools import partial
from pathlib import Path

import pytest

from elastic.trainer.parallel.order import Kind, Pass, order
from elastic.trainer.parallel.pipeline import Schedule

ROOT = Path(__file__).parents[3]
TOOK: dict[Kind, int] = {"forward": 1, "backward": 2, "inputs": 1, "weights": 1}
IN_ONE = {**TOOK, "inputs": 2, "weights": 0}
"""The last stage's before torch 2.13: `zero_bubble.LOSS_IN_ONE`."""
BACK: tuple[Kind, ...] = ("backward", "inputs")
"""What the stage before waits for."""


def bubble(
    schedule: Schedule, *, pp: int, virtual: int, leaves: int, loss_in_one: bool = False
) -> float:
    """How much longer a step takes than a rank is busy."""
    last = pp * virtual - 1
    left = {
        rank: order(schedule, rank=rank, pp=pp, virtual=virtual, leaves=leaves)
        for rank in range(pp)
    }
    ends: dict[tuple[Kind, int, int], int] = {}
    now, busy = dict.fromkeys(left, 0), dict.fromkeys(left, 0)
    while any(left.values()):
        before = len(ends)
        for rank, passes in left.items():
            while passes:
                stage = passes[0].stage * pp + rank
                begins = _begins(passes[0], stage, last, ends)
                if begins is None:
                    break
                one = passes.pop(0)
                took = (IN_ONE if loss_in_one and stage == last else TOOK)[one.kind]
                now[rank] = ends[one.kind, stage, one.leaf] = max(now[rank], begins) + took
                busy[rank] += took
        assert len(ends) > before, "all wait"
    (each,) = set(busy.values())
    return max(now.values()) / each - 1


def _begins(one: Pass, stage: int, last: int, ends: dict[tuple[Kind, int, int], int]) -> int | None:
    """When what a pass takes from another stage is there; None: it is not."""
    if one.kind == "forward" and stage > 0:
        return ends.get(("forward", stage - 1, one.leaf))
    if one.kind in BACK and stage < last:
        return next((ends[had] for k in BACK if (had := (k, stage + 1, one.leaf)) in ends), None)
    return 0


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_bubbles_are_those_of_the_formula(pp: int, times: int) -> None:
    leaves = times * pp
    once = (pp - 1) / leaves
    assert bubble("gpipe", pp=pp, virtual=1, leaves=leaves) == pytest.approx(once)
    assert bubble("1f1b", pp=pp, virtual=1, leaves=leaves) == pytest.approx(once)
    for virtual in (1, 2, 3):
        waited = partial(bubble, pp=pp, virtual=virtual, leaves=leaves)
        assert waited("interleaved") == pytest.approx(once / virtual)
        assert waited("zero-bubble") == pytest.approx(once / virtual / 3)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_where_the_last_stage_does_not_split_its_backward(pp: int, times: int) -> None:
    """With several stages a rank the others wait for it once each `pp` leaves: more of them do not help."""
    for virtual in (1, 2, 3):
        waited = 2 * pp - 1 + (pp - 1) * (times - 1 if virtual > 1 else 0)
        found = bubble("zero-bubble", pp=pp, virtual=virtual, leaves=times * pp, loss_in_one=True)
        assert found == pytest.approx(waited / (3 * virtual * times * pp))


def test_the_docs_table() -> None:
    text = (ROOT / "docs" / "trainer.md").read_text()
    head = "| ranks p | stages of a rank v | leaves m |"
    rows = text.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 5
    for row in rows:
        pp, virtual, leaves = (int(cell) for cell in row.split("|")[1:4])
        waited = partial(bubble, pp=pp, virtual=virtual, leaves=leaves)
        found = [
            waited("1f1b" if virtual == 1 else "interleaved"),
            waited("zero-bubble"),
            waited("zero-bubble", loss_in_one=True),
        ]
        assert [cell.strip() for cell in row.split("|")[4:-1]] == [f"{one:.1%}" for one in found], (
            row
        )

"""Which samples a run reads where it leaves some out."""

import pytest

from elastic.data import Skips
from elastic.trainer.run.plan import Plan
from elastic.trainer.schedules import BatchSizes

PLAN = Plan(sizes=BatchSizes.constant(8), steps=12, leaf_size=2)


def read(skips: Skips) -> list[int]:
    """All that it trains on, batch after batch."""
    batches = (
        [place for leaf in PLAN.of(step, skips, 0, 1) for place in leaf.places.tolist()]
        for step in range(PLAN.steps)
    )
    return [place for batch in batches for place in sorted(batch)]


def test_each_sample_is_read_once() -> None:
    assert read(Skips()) == list(range(96))


@pytest.mark.parametrize("ranges", [[(8, 24)], [(0, 8)], [(0, 8), (16, 40)], [(88, 96)], [(0, 48)]])
def test_what_is_left_out_is_not_read_at_the_end_either(ranges: list[tuple[int, int]]) -> None:
    left = [place for place in range(96) if not any(a <= place < b for a, b in ranges)]
    found = read(Skips.of(ranges))
    assert [set(found[at : at + 8]) for at in range(0, 96, 8)] == [
        set((left * 2)[at : at + 8]) for at in range(0, 96, 8)
    ]


def test_what_goes_wrong_at_the_end_is_left_out_there() -> None:
    """The guard names places on the line, beyond the run's samples too."""
    skips = Skips.of([(8, 24)])
    line = PLAN.line(skips)
    first, end = line.place(88), line.place(95) + 1
    assert (first, end) == (96 + 24, 96 + 32)
    again = read(skips.add(first, end))
    assert not set(again[88:]) & set(range(24, 32))
    assert again[:88] == read(skips)[:88]

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.parallel.grid import Grid

DEGREES = st.integers(1, 6)


@given(dp=DEGREES, pp=DEGREES, tp=DEGREES)
def test_each_rank_has_a_place_of_its_own(dp: int, pp: int, tp: int) -> None:
    grid = Grid.of(dp * pp * tp, tp=tp, pp=pp)
    assert (grid.dp, grid.size) == (dp, dp * pp * tp)
    places = [grid.place(rank) for rank in range(grid.size)]
    assert [grid.rank(place) for place in places] == list(range(grid.size))
    assert all(p.dp < dp and p.pp < pp and p.tp < tp for p in places)


@given(pp=DEGREES, tp=DEGREES, replica=st.integers(0, 5))
def test_a_replicas_ranks_follow_one_another(pp: int, tp: int, replica: int) -> None:
    grid = Grid.of(6 * pp * tp, tp=tp, pp=pp)
    ranks = range(replica * pp * tp, (replica + 1) * pp * tp)
    assert {grid.place(rank).dp for rank in ranks} == {replica}


def test_a_layer_is_shared_out_among_neighbours() -> None:
    grid = Grid.of(8, tp=2, pp=2)
    assert [grid.place(rank) for rank in (0, 1, 2, 7)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 1, 1),
    ]


@pytest.mark.parametrize("world", [0, 1, 6])
def test_a_world_that_is_no_multiple_is_refused(world: int) -> None:
    with pytest.raises(UsageError, match="start 4 or a multiple"):
        Grid.of(world, tp=2, pp=2)

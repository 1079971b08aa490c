import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.data.splits import Splits, check_asked, fractions, ranges


@given(
    shares=st.lists(st.floats(0, 1e6), min_size=1, max_size=3).filter(lambda s: sum(s) > 1e-3),
    count=st.integers(0, 10**9),
)
def test_every_sequence_is_in_one_split(shares: list[float], count: int) -> None:
    found = ranges(",".join(f"{share:.9f}" for share in shares), count)
    assert (found.train.start, found.test.stop) == (0, count)
    assert (found.train.stop, found.valid.stop) == (found.valid.start, found.test.start)


def test_halves_are_rounded_to_the_even() -> None:
    assert ranges("949,50,1", 10) == Splits(range(9), range(9, 10), range(10, 10))
    assert ranges("1,1", 5) == Splits(range(2), range(2, 5), range(5, 5))


@pytest.mark.parametrize(
    "text", ["", "0,0,0", "1,2,3,4", "1.2.3", "a,1,1", "-1,2", "1e3,1", "9" * 400]
)
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--split is three shares such as 949,50,1, not"):
        fractions(text)


def test_samples_of_an_empty_split_are_refused() -> None:
    found = ranges("949,50,1", 10)
    check_asked(found, Splits(100, 10, 0), "949,50,1")
    with pytest.raises(
        UsageError, match="949,50,1 leaves nothing of 10 sequences for test, of which 5"
    ):
        check_asked(found, Splits(100, 10, 5), "949,50,1")

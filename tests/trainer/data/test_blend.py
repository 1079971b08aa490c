import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.data import blend, index_cache
from tests.trainer.data.peak import peak


def test_it_is_the_known_order() -> None:
    found = blend.by_weight([0.5, 0.3, 0.2], 12)
    assert found.datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1, 2]
    assert found.samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3, 2]


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), samples=st.integers(0, 300))
def test_no_dataset_is_far_from_its_share(weights: list[float], samples: int) -> None:
    found = blend.by_weight(weights, samples)
    length = sum(blend.shares(weights, samples))
    assert samples <= length == len(found.datasets) == len(found.samples)
    for number, weight in enumerate(weights):
        own = found.samples[found.datasets == number].tolist()
        assert own == list(range(len(own)))
        assert abs(len(own) - length * weight / sum(weights)) <= len(weights)


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_without_a_number_every_sample_comes_once(sizes: list[int]) -> None:
    found = blend.by_size(sizes)
    seen = set(zip(found.datasets.tolist(), found.samples.tolist(), strict=True))
    assert len(seen) == len(found.samples) == sum(sizes)
    found.check(sizes)


def test_more_than_a_dataset_has_is_refused() -> None:
    found = blend.by_weight([1, 1], 10)
    found.check([5, 5])
    with pytest.raises(UsageError, match="takes 5 samples of dataset 1, which has 4"):
        found.check([6, 4])


@pytest.mark.parametrize("weights", [[1, 0], [1, -1], [1, float("nan")], [float("inf"), 1]])
def test_a_weight_that_is_none_is_refused(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="numbers above 0"):
        blend.by_weight(weights, 10)


@pytest.mark.parametrize("count", [0, 32767])
def test_too_many_or_no_datasets_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"1 to 32766 datasets, not {count}"):
        blend.by_size([1] * count)


@pytest.mark.parametrize("given", [["0.5", "a", "0.5"], ["1", "a", "2", "b", "3"]])
def test_a_weight_without_a_prefix_is_refused(given: list[str]) -> None:
    with pytest.raises(UsageError, match="weights and prefixes come in pairs"):
        blend.parse(given)
    assert blend.parse(["7"], lambda _: False) == (["7"], None), "a prefix may be a number"


def test_a_weight_for_some_is_refused() -> None:
    with pytest.raises(
        UsageError, match="30 a b c: give each prefix a weight before it, or give none"
    ):
        blend.parse(["30", "a", "b", "c"])


@pytest.mark.parametrize(
    ("given", "wrong"), [("a 0.3 b", "0.3"), ("a 0.3", "0.3"), ("1 a 2 3", "3"), ("1 2", "2")]
)
def test_a_number_in_a_prefixs_place_is_one_only_where_it_is_there(given: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=f"--data-path {given}: {wrong} stands where a prefix"):
        blend.parse(given.split(), lambda _: False)
    names, _ = blend.parse(given.split(), lambda _: True)
    assert wrong in names


def test_it_takes_the_memory_that_is_reckoned() -> None:
    for make in (
        lambda: blend.by_weight([1.0, 2.0], 200_000),
        lambda: blend.by_size([10**5, 10**5]),
    ):
        made, most = peak(make)
        reckoned = index_cache.BLENDING * len(made.datasets)
        assert reckoned / 1.6 < most < reckoned

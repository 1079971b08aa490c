import gc
import multiprocessing
import pickle
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.data import DataFlags
from elastic.trainer.data import indexed
from elastic.trainer.data.gpt_dataset import GPTDataset, asked, datasets
from elastic.trainer.data.indexed import write
from elastic.trainer.data.items import Form, Item
from elastic.trainer.data.mock import MockDataset
from elastic.trainer.data.splits import Splits

FORM = Form(vocab_size=600, eod=599)
COUNTS = Splits(train=50, valid=8, test=3)


@dataclass(frozen=True)
class Words:
    vocab_size: int = 600
    eod: int = 599


def store(prefix: Path, *, documents: int = 60, first: int = 0) -> str:
    """Documents of 9 tokens, from `first` on."""
    with write(prefix, np.dtype("<u2")) as writer:
        for number in range(documents):
            writer.add_document([[*(first + (number * 8 + k) % 500 for k in range(8)), 599]])
    return str(prefix)


def flags(*prefixes: str, **more: Any) -> DataFlags:
    told: dict[str, Any] = {"data_path": prefixes, "seq_length": 6, "split": "8,1,1"}
    return DataFlags(**told | more)


def train(given_flags: DataFlags, count: int = 50) -> GPTDataset:
    found = datasets(given_flags, Words(), Splits(train=count, valid=0, test=0))[0]
    assert isinstance(found, GPTDataset)
    return found


def same(one: Item, other: Item) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def read(dataset: GPTDataset) -> list[Item]:
    return [dataset[number] for number in range(10)]


def test_another_process_finds_the_same(tmp_path: Path) -> None:
    dataset = train(flags("1", store(tmp_path / "a"), "2", store(tmp_path / "b", first=50)))
    sent = pickle.dumps(dataset)
    assert len(sent) < 3000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(read, (dataset,))
    assert all(map(same, found, read(dataset)))
    assert {int(item["dataset_id"]) for item in found} == {0, 1}
    assert all(item["tokens"].min() >= 50 for item in found if item["dataset_id"] == 1)


def test_indices_are_kept_beside_the_data_or_where_told(tmp_path: Path) -> None:
    train(flags(store(tmp_path / "a")))
    assert any((tmp_path / "cache" / "GPTDataset_indices").glob("*-GPTDataset-train-sample*"))
    train(flags("1", str(tmp_path / "a"), data_cache_path=tmp_path / "other"))
    assert len(list((tmp_path / "other").glob("*-BlendedDataset-train-dataset*.npy"))) == 2


def test_a_start_reads_each_index_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever splits are made of it; another one where it has been written again."""
    checked, check = [], indexed._check_sequences

    def counted(path: Path, *words: Any) -> int:
        checked.append(path.stem)
        return check(path, *words)

    monkeypatch.setattr(indexed, "_check_sequences", counted)
    one, two = store(tmp_path / "a"), store(tmp_path / "b", first=50)
    held = [
        datasets(flags(one), Words(), COUNTS),
        datasets(flags("1", one, "2", two), Words(), COUNTS),
    ]
    assert checked == ["a", "b"]
    store(tmp_path / "a", first=1)
    again = train(flags(one))
    assert checked == ["a", "b", "a"]
    assert held[0][0] is not None
    assert held[0][0].digest != again.digest
    assert indexed.shared(one) is indexed.shared(one)
    del held, again
    gc.collect()
    assert not any(prefix in (one, two) for prefix, _ in indexed._opened), "files are closed"


def test_a_digest_is_of_the_order_and_not_of_the_place(tmp_path: Path) -> None:
    prefix, elsewhere = store(tmp_path / "a"), store(tmp_path / "moved")
    mine = train(flags(prefix)).digest
    assert mine == train(flags(elsewhere, data_cache_path=tmp_path / "c")).digest
    others = {
        "two epochs": train(flags(prefix), 100).digest,
        "of which the second is nearly whole": train(flags(prefix), 140).digest,
        "seed": train(flags(prefix, seed=1)).digest,
        "length": train(flags(prefix, seq_length=7)).digest,
        "split": train(flags(prefix, split="9,1,0")).digest,
        "loss mask": train(flags(prefix, eod_mask_loss=True)).digest,
        "position ids": train(flags(prefix, reset_position_ids=True)).digest,
        "weight": train(flags("1", prefix)).digest,
        "tokens": train(flags(store(tmp_path / "t", first=1))).digest,
        "documents": train(flags(store(tmp_path / "d", documents=61))).digest,
    }
    assert len({mine, *others.values()}) == 1 + len(others), others


def test_a_digest_of_mock_data_is_of_all_that_makes_them() -> None:
    words: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"seq_length": 7}, {"eod_mask_loss": True}, {"reset_position_ids": True},
        {"eod_mask_loss": True, "reset_position_ids": True},
    ]  # fmt: skip
    found = set()
    for one in words:
        mock = datasets(
            DataFlags(**{"mock_data": True, "seq_length": 6, **one}), Words(), Splits(9, 9, 0)
        )
        for split in mock[:2]:
            assert isinstance(split, MockDataset)
            found.add(split.digest)
    assert len(found) == 2 * len(words)


@pytest.mark.parametrize("path", ["{a}", "{a} {b}", "2 {a} 1 {b}"])
def test_a_run_that_is_made_longer_has_the_same_samples_where_digests_say_so(
    tmp_path: Path, path: str
) -> None:
    a, b = store(tmp_path / "a"), store(tmp_path / "b", first=50)
    words = flags(*path.format(a=a, b=b).split())
    counts = (20, 33, 60, 71) if path == "{a} {b}" else (20, 33, 60, 71, 90, 100, 140, 150, 300)
    found = [train(words, count) for count in counts]
    same_digest = [(short, long) for short, long in pairwise(found) if short.digest == long.digest]
    assert len(same_digest) >= 2
    for short, long in same_digest:
        for number in range(counts[found.index(short)]):
            assert same(short[number], long[number]), number


def test_validation_sets_have_names_and_all_samples_each(tmp_path: Path) -> None:
    a, b = store(tmp_path / "a"), store(tmp_path / "b", first=50)
    several = DataFlags(
        train_data_path=(a,), valid_data_path=(a, b), seq_length=6, multiple_validation_sets=True
    )
    found = datasets(several, Words(), COUNTS)
    assert found[2] is None, "no data are given for the test"
    assert isinstance(found[1], list)
    assert [(one.name, len(one) >= 8) for one in found[1]] == [("0", True), ("1", True)]
    assert found[1][0].digest != found[1][1].digest
    named = datasets(replace(several, validation_set_names=("wiki", "code")), Words(), COUNTS)[1]
    assert isinstance(named, list)
    assert [one.name for one in named] == ["wiki", "code"]
    with pytest.raises(UsageError, match="gives 1 names to 2 validation sets"):
        datasets(replace(several, validation_set_names=("wiki", "wiki")), Words(), COUNTS)
    with pytest.raises(UsageError, match="without weights"):
        datasets(replace(several, valid_data_path=("1", a, "1", b)), Words(), COUNTS)


def test_data_that_do_not_give_what_is_asked_are_refused(tmp_path: Path) -> None:
    one, two = store(tmp_path / "a"), store(tmp_path / "b", documents=2)
    counts = Splits(train=5, valid=5, test=5)
    with pytest.raises(
        UsageError, match=r"a: --split 999,1,0 leaves nothing of 60 sequences for v"
    ):
        datasets(flags(one, split="999,1,0"), Words(), counts)
    with pytest.raises(UsageError, match=r"a: --split 0,1,0 leaves nothing of 60 sequences for t"):
        datasets(flags(one, split="0,1,0"), Words(), counts)
    assert datasets(flags(one, split="1,0,0"), Words(), counts)[1:] == (None, None)
    with pytest.raises(
        UsageError, match="in one epoch, and 5000 are asked for: give each a weight"
    ):
        train(flags(one, two), 5000)
    with pytest.raises(UsageError, match=r"missing\.idx: No such file"):
        train(flags(str(tmp_path / "missing")))
    with pytest.raises(UsageError, match="a has token id 599, and the vocabulary 599: give the"):
        datasets(flags(one), Words(599, 1), counts)[0][0]  # type: ignore[index]
    with write(tmp_path / "empty", np.dtype("<u2")):
        pass
    with pytest.raises(UsageError, match="0 sequences with 0 tokens give no sample"):
        datasets(
            DataFlags(train_data_path=(str(tmp_path / "empty"),), seq_length=6), Words(), counts
        )


@pytest.mark.parametrize(
    ("given_flags", "message"),
    [
        ({"data_path": ("a",), "train_data_path": ("a",)}, "data are given in one way"),
        ({"data_path": ("a",), "mock_data": True}, "data are given in one way"),
        ({"train_data_path": ("a",), "split": "1"}, "--split divides --data-path"),
        ({"data_path": ("a",), "multiple_validation_sets": True}, "give that"),
        ({"mock_data": True, "validation_set_names": ("a",)}, "goes with --multiple-validation"),
        ({"mock_data": True, "seed": -1}, "--seed is at least 0"),
        ({"mock_data": True, "seq_length": 0}, "--seq-length is at least 1"),
        ({"mock_data": True, "num_workers": -1}, "--num-workers is at least 0"),
        ({"mock_data": True, "data_storage_options": "[1]"}, "--data-storage-options is no JSON"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(
    given_flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        DataFlags(**{"seq_length": 6} | given_flags)


def test_no_data_are_a_mistake_where_data_are_wanted() -> None:
    with pytest.raises(UsageError, match="data are given in one way"):
        datasets(DataFlags(seq_length=6), Words(), COUNTS)


def test_samples_are_asked_for_by_megatrons_count() -> None:
    counted: Any = {"train_iters": 100, "eval_iters": 10, "global_batch_size": 8}
    assert asked(777, eval_interval=30, **counted) == Splits(train=777, valid=320, test=80)
    assert asked(777, eval_interval=0, **counted) == Splits(train=777, valid=0, test=80)
    whole = asked(777, eval_interval=30, full_validation=True, **counted)
    assert whole == Splits(train=777, valid=None, test=80)


@pytest.mark.parametrize("path", ["{a}", "1 {a}", "{a} {b}", "9 {a} 1 {b}"])
def test_a_set_of_which_no_number_is_asked_has_each_sample_once(tmp_path: Path, path: str) -> None:
    a, b = store(tmp_path / "a"), store(tmp_path / "b", documents=30, first=50)
    words = flags(*path.format(a=a, b=b).split())
    found = datasets(words, Words(), Splits(train=5, valid=None, test=0))[1]
    assert isinstance(found, GPTDataset)
    # A tenth of 60 documents of 9 tokens, or of 30, in samples of 6 and one more.
    assert len(found) == (54 - 1) // 6 + ((27 - 1) // 6 if b in words.data_path else 0)
    seen = {
        (int(item["dataset_id"]), item["tokens"].tobytes())
        for item in map(found.__getitem__, range(len(found)))
    }
    assert len(seen) == len(found)
    mock = datasets(DataFlags(mock_data=True, seq_length=6), Words(), Splits(1, None, 0))[1]
    assert isinstance(mock, MockDataset)
    assert len(mock) > 0


def mock(**more: Any) -> MockDataset:
    told: dict[str, Any] = {"name": "train", "samples": 100, "seq_length": 64, "seed": 1}
    return MockDataset(**told | {"form": FORM} | more)


@given(number=st.integers(0, 99), seed=st.integers(0, 2**32 - 1), size=st.integers(1, 70_000))
def test_mock_samples_are_functions_of_seed_and_number(number: int, seed: int, size: int) -> None:
    form = Form(vocab_size=size, eod=size // 2)
    item = mock(seed=seed, form=form)[number]
    assert same(item, mock(seed=seed, form=form)[number])
    tokens, labels = item["tokens"], item["labels"]
    assert tokens.shape == labels.shape == (64,)
    assert 0 <= tokens.min() <= tokens.max() < size
    assert np.array_equal(tokens[1:], labels[:-1])


def test_mock_samples_differ_and_can_be_learnt() -> None:
    found = [mock()[number]["tokens"] for number in range(100)]
    others = [mock(seed=2)[0]["tokens"], mock(name="valid")[0]["tokens"]]
    assert len({one.tobytes() for one in [*found, *others]}) == 102
    steps = np.concatenate([np.diff(one) for one in found])
    assert (steps == 1).mean() > 0.9
    assert not np.array_equal(mock()[3]["tokens"], mock()[4]["tokens"])


def test_mock_data_need_no_files() -> None:
    made = datasets(DataFlags(mock_data=True, seq_length=6), Words(), COUNTS)
    assert [len(one) for one in made if one is not None] == [50, 8, 3]
    with pytest.raises(IndexError):
        made[2][3]  # type: ignore[index]

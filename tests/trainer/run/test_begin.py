"""What a script's own functions give a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.data.tokenizers import NullTokenizer, load
from elastic.trainer.run import begin
from elastic.trainer.run.plan import Plan
from tests.trainer.arguments.test_effects import run

SETTINGS = run("--eval-iters 2")
PLAN = Plan(sizes=SETTINGS.schedules.batch_sizes(), steps=1, leaf_size=1)
DATA = [{"tokens": n, "loss_mask": 1.0} for n in range(2 * PLAN.samples)]


class Script:
    """A dataset that says nothing of itself."""

    def __init__(self, size: int, item: Any = None) -> None:
        self.size, self.item = size, item

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        return self.item


@pytest.mark.parametrize(
    ("valid", "sets"),
    [(None, []), (DATA, [DATA]), ([DATA, DATA], [DATA, DATA]), ([], [])],
)
def test_a_list_of_items_is_one_set_and_a_list_of_lists_several(valid: Any, sets: Any) -> None:
    found = begin.checked((DATA, valid, None), SETTINGS, PLAN)
    assert [*found.validation] == sets


def test_no_tokenizer_replaces_another_without_a_word(tmp_path: Path) -> None:
    flags = CheckpointFlags(save=str(tmp_path))
    one, other = NullTokenizer(words=300), NullTokenizer(words=350)
    for tokenizer, finished, said in (
        (one, 0, []), (one, 3, []), (other, 0, [f"another tokenizer was kept in {tmp_path}, and is replaced"]),
    ):  # fmt: skip
        assert begin.keep_tokenizer(flags, tokenizer, finished) == said
        assert load(tmp_path) == tokenizer
    with pytest.raises(UsageError, match="has another tokenizer than this run: give that one"):
        begin.keep_tokenizer(flags, one, 3)
    assert load(tmp_path) == other


def test_what_a_dataset_is_does_not_follow_from_its_length() -> None:
    class Said(Script):
        digest = "mine"

    other: Any = DATA
    assert begin.digest(Script(12)) == begin.digest(Script(3)) != begin.digest(other)
    assert (begin.digest(Said(12)), begin.digest(None)) == ("mine", "")


class Stream(IterableDataset[Any]):
    """Without a length."""

    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.parametrize(
    ("train", "valid", "said"),
    [
        (Stream(), None, "^the train data, of type Stream, have no length: give a dataset whose"),
        (DATA, Stream(), "^the validation data, of type Stream, have no length"),
        (Script(12, torch.ones(2)), None, "^a sample of the train data is of type Tensor: give a dict of"),
        (Script(12, {"tokens": "a"}), None, "^'tokens' in a sample of the train data, of type str, is no"),
        (Script(12, {"tokens": None}), None, "^'tokens' in a sample of the train data, of type NoneType"),
        (DATA, Script(12, (1, 2)), "^a sample of the validation data is of type tuple: give a dict"),
        (DATA, Script(12, {"text": torch.ones(2)}), "^samples of the validation data have no loss_mask"),
    ],
)  # fmt: skip
def test_samples_that_no_step_can_take_are_found_before_the_first_one(
    train: Any, valid: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        begin.checked((train, valid, None), SETTINGS, PLAN)


def test_what_is_only_trained_on_needs_no_mask() -> None:
    for text in (np.ones(2), torch.ones(2), 3):
        assert begin.checked((Script(12, {"text": text}), DATA, None), SETTINGS, PLAN)


def test_data_that_are_too_few_are_found_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="validation data without any sample"):
        begin.checked((DATA, [DATA, []], None), SETTINGS, PLAN)
    with pytest.raises(UsageError, match="and the data have 1: make it shorter"):
        begin.checked((DATA[:1], None, None), SETTINGS, PLAN)


def test_words_that_cannot_be_shared_out_are_told_before_data_are_opened() -> None:
    shape = "--num-attention-heads 5 --hidden-size 40 --vocab-size 300 --make-vocab-size-divisible-by 128"
    settings = run(f"{shape} --tensor-model-parallel-size 5")
    with pytest.raises(UsageError, match="size 5 does not divide the padded vocabulary 384"):
        begin.introduce(settings, world_size=5, rank=0)

"""What a script's own functions give a run."""

from pathlib import Path
from typing import Any

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.data.tokenizers import NullTokenizer, load
from elastic.trainer.run import begin
from elastic.trainer.run.plan import Plan
from tests.trainer.arguments.test_effects import run

SETTINGS = run("--eval-iters 2")
PLAN = Plan(sizes=SETTINGS.schedules.batch_sizes(), steps=1, leaf_size=1)
DATA = [{"tokens": n} for n in range(2 * PLAN.samples)]


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


def test_data_that_are_too_few_are_found_before_the_first_step() -> None:
    with pytest.raises(UsageError, match="validation data without any sample"):
        begin.checked((DATA, [DATA, []], None), SETTINGS, PLAN)
    with pytest.raises(UsageError, match="and the data have 1: make it shorter"):
        begin.checked((DATA[:1], None, None), SETTINGS, PLAN)

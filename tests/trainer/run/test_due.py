"""What is due behind a step, where some are held, taken back or computed again."""

from collections.abc import Iterable

import pytest

from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.run.due import Due, due

FLAGS = CheckpointFlags(save="s", save_interval=10, exit_interval=20)
NOTHING = Due(settle=False, persist=False, end=False)


def went(
    start: int, steps: Iterable[int], held: Iterable[int] = ()
) -> tuple[list[int], list[int], list[int]]:
    """From a checkpoint of `start`: of `steps`, in their order, those that are saved, on storage, and behind which
    the run would end."""
    settled, odd = start, set(held)
    found: tuple[list[int], list[int], list[int]] = ([], [], [])
    for step in steps:
        one = due(step, settled, FLAGS, holds=step in odd, over=False)
        settled = step if one.settle else settled
        for steps_of, is_due in zip(found, (one.settle, one.persist, one.end), strict=True):
            steps_of += [step] * is_due
    return found


def test_all_steps_are_saved_and_multiples_on_storage() -> None:
    assert went(0, range(1, 22)) == (list(range(1, 22)), [10, 20], [20])
    assert went(10, range(11, 13)) == ([11, 12], [], []), "what a run begins from is there"


def test_what_falls_on_odd_steps_is_made_up_for_by_the_first_good_one() -> None:
    assert went(18, range(19, 24), held=[20]) == ([19, 21, 22, 23], [21], [21])
    assert went(18, range(19, 32), held=range(19, 31)) == ([31], [31], [31]), "once"


@pytest.mark.parametrize("start", [17, 19], ids=["an older one", "the newest"])
def test_ranks_that_begin_again_in_between_come_to_the_same(start: int) -> None:
    _, on_storage, ends = went(start, range(start + 1, 23), held=[20])
    assert (on_storage, ends) == ([21], [21])


def test_what_is_taken_back_is_due_again_in_its_turn() -> None:
    assert went(17, [18, 19, 20, 18, 19, 20], held=[]) == ([18, 19, 20], [20], [20])
    assert due(20, 17, FLAGS, holds=True, over=True) == NOTHING
    assert not due(18, 17, FLAGS, holds=False, over=False).persist, "behind a rollback from 20 on"
    assert due(20, 19, FLAGS, holds=False, over=False).persist


def test_steps_that_are_computed_again_are_not_saved_again_nor_the_end() -> None:
    assert due(20, 24, FLAGS, holds=False, over=True) == NOTHING
    assert due(25, 24, FLAGS, holds=False, over=True).end

"""What leaves report, whose names need not be the same in all."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import HashStore

from elastic.proto.errors import UsageError
from elastic.trainer.run import evaluating
from elastic.trainer.run.step import Share, Stepper
from elastic.trainer.run.told import watched
from elastic.trainer.watch.evaluation import Piece, Reading
from tests.trainer.run import reported
from tests.trainer.run.reported import HEARD, LEAVES, Reports


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Numbered:
    """Samples that are their own numbers, of one token each, with the names of the columns that a loss wants."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> dict[str, NDArray[np.generic]]:
        return {"leaves": np.int64(at), "loss_mask": np.ones(1, np.float32)}  # type: ignore[dict-item]


def laid() -> Any:
    place, grid = SimpleNamespace(dp=0), SimpleNamespace(dp=1)
    return SimpleNamespace(device=torch.device("cpu"), place=place, grid=grid)


def test_a_loss_mask_may_be_one_number_a_sample() -> None:
    """Of a team's own data; some of the samples only fill up."""
    share = Share([], {"loss_mask": torch.ones(4)})
    mine = [Piece(number=0, ids=np.arange(4), counts=np.array([1, 1, 1, 0], np.float32))]
    counted = evaluating._counted(share, mine).batch["loss_mask"]
    assert counted.tolist() == [1, 1, 1, 0]


def evaluated(stepper: Stepper, samples: int) -> dict[str, float]:
    reading = Reading(first=0, samples=samples, length=4)
    return evaluating.evaluate(stepper, laid(), Numbered(), reading, LEAVES, workers=0)


def test_reports_may_be_missing_and_come_later() -> None:
    """What no leaf has is of nothing; what comes later is told of, and agreed on."""
    assert reported.heard() == HEARD


def test_a_run_that_goes_on_tells_of_the_same_reports_and_the_guard_looks_at_the_same_loss() -> (
    None
):
    """Whatever its next step has: one that was not killed has agreed on them before."""
    first: Sequence[Reports] = [{"loss of code": 2.0}] * 4
    then: Sequence[Reports] = [{"loss of text": 1.0}, *[{"loss of code": 4.0}] * 3]
    whole = reported.stepper([first, then])
    whole.evaluate(reported.share(), LEAVES)
    wanted = whole.evaluate(reported.share(), LEAVES)
    resumed = reported.stepper([then], names=whole.names)
    found = resumed.evaluate(reported.share(), LEAVES)
    assert list(found.totals) == list(wanted.totals) == ["loss of code"]
    assert watched(found.totals, "--guard") == "loss of code"
    assert found.unnamed == wanted.unnamed == 1


def test_a_run_that_goes_on_with_another_loss_function_tells_of_its_reports() -> None:
    """Else its guard would look at a loss that never comes."""
    resumed = reported.stepper([[{"xent": 2.0}] * 4], names=["loss of code"])
    assert list(resumed.evaluate(reported.share(), LEAVES).totals) == resumed.names == ["xent"]


def test_an_evaluation_agrees_once_a_set_and_again_where_a_batch_has_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed: list[list[str]] = []
    agree = Stepper.agree

    def counted(stepper: Stepper) -> list[str]:
        agreed.append(agree(stepper))
        return agreed[-1]

    monkeypatch.setattr(Stepper, "agree", counted)
    plain: Sequence[Reports] = [{"lm loss": 2.0}] * 4
    odd: Sequence[Reports] = [{"lm loss": 2.0}] * 3 + [{"lm loss": 6.0, "aux": 1.0}]
    stepper = reported.stepper([plain, plain, plain, plain, odd, plain, odd, plain])
    assert reported.LEAVES.count == 4
    stepper.evaluate(reported.share(), LEAVES)
    assert agreed == [["lm loss"]]
    assert evaluated(stepper, 8) == {"lm loss": 2.0}
    assert agreed == [["lm loss"]] * 2, "of two batches the first"
    assert evaluated(stepper, 8) == {"lm loss": 2.5, "aux": 1.0}
    assert agreed[2:] == [["lm loss"], ["aux"]]
    assert list(stepper.evaluate(reported.share(), LEAVES).totals) == ["lm loss"], "as before"


class Probes(Numbered):
    def results(self, means: Sequence[float]) -> Sequence[float]:
        return means


@pytest.mark.parametrize(
    "reports",
    [
        {"aux": 9.0, "lm loss": 2.0},
        {"lm loss wiki": 9.0, "loss": 2.0, "aux": 9.0},
    ],
)
def test_probes_tell_the_loss_that_the_guard_judges(reports: Reports) -> None:
    stepper, probes = reported.stepper([[reports] * 4]), Probes()
    assert evaluating.probe(stepper, laid(), probes, LEAVES) == [2.0] * 4  # type: ignore[arg-type,comparison-overlap]


def test_probes_without_a_loss_are_a_sentence() -> None:
    stepper, probes = reported.stepper([[{}] * 4]), Probes()
    with pytest.raises(UsageError, match=r"--probe-file looks at a loss, .* reports none"):
        evaluating.probe(stepper, laid(), probes, LEAVES)  # type: ignore[arg-type]

"""What a run does follows its arguments: tiny runs, one after another in one process."""

from typing import Any

import pytest

from tests.trainer.arguments import tiny
from tests.trainer.arguments.test_effects import RUNS

pytestmark = pytest.mark.xdist_group("effects")  # one run for all of them


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each run, by its arguments beside the common ones."""
    base = tmp_path_factory.mktemp("runs")
    (base / "probes").write_text('{"name": "one", "text": "1 2 3 4"}\n')
    said = [
        tiny.SAVED,  # there before the others, which begin from it
        " --exit-interval 3",
        *(one for beside, more in RUNS.values() for one in (beside, f"{beside} {more}")),
    ]
    return tiny.told(base, {one: one for one in said})


@pytest.mark.parametrize("name", RUNS)
def test_an_argument_changes_what_a_run_does(name: str, told: dict[str, Any]) -> None:
    beside, more = RUNS[name]
    assert told[beside]["status"] == 0, told[beside]["text"]
    assert told[beside] != told[f"{beside} {more}"]


def test_the_same_arguments_do_the_same(told: dict[str, Any]) -> None:
    """Else any difference would do: `--exit-interval 3` changes nothing."""
    assert told[""] == told[" --exit-interval 3"]


def test_steps_of_fp16_that_overflow_are_skipped_and_said(told: dict[str, Any]) -> None:
    beside, more = RUNS["loss_scale"]
    for said, scale, skipped in ((beside, "1024.0", 0), (f"{beside} {more}", "1000000000.0", 1)):
        lines = [one for one in told[said]["text"].splitlines() if "| loss scale: " in one]
        assert len(lines) == 3
        for line in lines:
            assert f"| loss scale: {scale} |" in line
            assert f"| number of skipped iterations:   {skipped} |" in line
            assert ("| lm loss: " in line) == (not skipped)

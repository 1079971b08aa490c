"""A team's script trains as `pretrain_gpt` does, to the bit, with only its imports changed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic.trainer.data.indexed import write
from elastic.trainer.watch import jsonl
from tests.trainer.launch import assert_same, finish, parameters, start, steps
from tests.trainer.watch.boards import points

pytestmark = pytest.mark.xdist_group("megatron")  # one run for all of them

TEAMS = Path(__file__).with_name("pretrain_team.py")
FLAGS = (
    "--mock-data=false", "--tokenizer-type=NullTokenizer", "--eod-mask-loss",
    "--train-iters=4", "--eval-iters=1", "--eval-interval=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, the script, and the run of `pretrain_gpt`."""
    base = tmp_path_factory.mktemp("runs")
    random = np.random.default_rng(1)
    for name in ("text", "code", "notes"):
        with write(base / name, np.dtype("<u2")) as writer:
            for length in random.integers(5, 90, size=60):
                writer.add_document([np.append(random.integers(0, 300, size=length), 300)])
    text = re.sub(r"(?m)^(\s*from )megatron\b", r"\1elastic.trainer.megatron", TEAMS.read_text())
    (base / "pretrain_team.py").write_text(text)
    finish(start(base, "ours", *FLAGS, *data(base), nproc=2))
    return base


def data(base: Path) -> tuple[str, ...]:
    """More is blended for validation than for training."""
    text, code, notes = (str(base / name) for name in ("text", "code", "notes"))
    return (
        "--train-data-path", "0.7", text, "0.3", code,
        "--valid-data-path", "0.2", code, "0.3", text, "0.5", notes,
    )  # fmt: skip


def team(base: Path, save: str, *flags: str, nproc: int = 2, board: bool = True, **env: str) -> str:
    """Its run of the same; returns what it printed."""
    script = (str(base / "pretrain_team.py"),)
    to = (f"--tensorboard-dir={base / save}-board",) if board else ()
    told = (*FLAGS, *data(base), *to, *flags)
    return finish(start(base, save, *told, nproc=nproc, script=script, env=env))


def test_a_teams_script_trains_to_the_same_bits(base: Path) -> None:
    output = team(base, "team")
    assert "building the team's model ...\n" in output
    assert_same(base, "ours", "team")
    # What its loss function returns with non_loss_data=True: rank 0 has half of the twelve leaves.
    assert "at iteration 2 of 6 leaves\n" in output
    found = points(base / "team-board")["team/largest loss"]
    assert {step for step, _ in found} == {2, 4}
    assert all(5 < value < 10 for _, value in found)


def test_losses_are_told_by_the_sources_of_what_is_read(base: Path) -> None:
    lines = list(jsonl.read(base / "ours.jsonl"))
    trained = {name for line in lines if line["kind"] == "step" for name in line["sources"]}
    assert trained == {"text", "code"}
    (first, *_) = (line["losses"] for line in lines if line["kind"] == "evaluation")
    loss = first.pop("lm loss")
    assert set(first) == {"lm loss code", "lm loss text", "lm loss notes"}
    assert min(first.values()) < loss < max(first.values())


@pytest.mark.soak
def test_a_script_that_reduces_its_reports_itself_trains_to_the_same_bits(base: Path) -> None:
    """With ZeRO 3, under which `non_loss_data_func` finds the model's parts gathered all the same."""
    output = team(base, "reduced", "--loss-style=reduced", "--zero-stage=3", TEAM_LOOKS="1")
    assert "at iteration 2 of 1 leaves\n" in output
    for (loss, *rest), (other, *others) in zip(
        steps(base, "ours").values(), steps(base, "reduced").values(), strict=True
    ):
        assert rest == others
        assert loss == pytest.approx(other, rel=1e-6)  # two ranks' sums in fp32
    wanted, found = parameters(base, "ours"), parameters(base, "reduced")
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


@pytest.mark.soak
def test_it_trains_to_the_same_bits_in_layers_that_ranks_share_and_in_stages(base: Path) -> None:
    layout = (
        "--tensor-model-parallel-size=2",
        "--sequence-parallel",
        "--pipeline-model-parallel-size=2",
    )
    finish(start(base, "ours-laid", *FLAGS, *data(base), *layout, nproc=4))
    team(base, "team-laid", *layout, nproc=4, board=False)
    assert_same(base, "ours-laid", "team-laid")

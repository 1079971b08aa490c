"""A spare that has rehearsed: the rank that it becomes compiles nothing, and computes the same bits."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from elastic.agent.starters import warmup
from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import subjects
from elastic.trainer.model import attention
from elastic.trainer.parallel import kernels
from elastic.trainer.run import rehearsal
from tests.trainer.arguments.effects import OPS, SHOWN
from tests.trainer.arguments.observed import words_of
from tests.trainer.arguments.tiny import SMALL as TINY
from tests.trainer.launch import ROOT, SMALL, TIMEOUT, finish, start, steps, training

SCRIPT = ("-m", "tests.trainer.run.rehearsed")
TP2 = ("--tensor-model-parallel-size=2", "--sequence-parallel", "--reduction=fast")
ROTARY = (
    "--swiglu",
    "--normalization=RMSNorm",
    "--position-embedding-type=rope",
    "--hidden-dropout=0.1",
)


def run(
    base: Path, name: str, ranks: int, *flags: str, env: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """What its ranks told."""
    script = (*SCRIPT, "--rehearse") if name == "rehearsed" else SCRIPT
    flags = ("--compile", "--bf16", "--num-layers=4", "--train-iters=3", *flags)
    output = finish(start(base, name, *flags, nproc=ranks, script=script, env=env))
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(1, (), id="exact", marks=pytest.mark.soak),
        pytest.param(2, TP2, id="shared-layers", marks=pytest.mark.soak),
        pytest.param(2, ROTARY, id="rotary", marks=pytest.mark.soak),
    ],
)
def test_a_rank_that_has_rehearsed_compiles_nothing(
    tmp_path: Path, ranks: int, flags: tuple[str, ...]
) -> None:
    plain = run(tmp_path, "plain", ranks, *flags)
    graphs = {one["rank"]: one["graphs"] for one in plain}
    assert len(graphs) == ranks
    assert min(graphs.values()) > 3, plain
    found = run(tmp_path, "rehearsed", ranks, *flags)
    told = {one.pop("rank"): one for one in found if "step" not in one}
    left = {"group": False, "models": 0, "run": False, "same": True}
    assert told == {rank: {"graphs": graphs[rank], **left} for rank in range(ranks)}
    assert [one["graphs"] for one in found if "step" in one] == [0] * 3 * ranks, found
    assert steps(tmp_path, "rehearsed") == steps(tmp_path, "plain")


@pytest.mark.soak
def test_who_compiles_otherwise_than_was_rehearsed_compiles_anew(tmp_path: Path) -> None:
    """Else a rank would have other kernels than those of the round before, and might end with other bits."""
    found = run(tmp_path, "rehearsed", 1, env={"CHANGED": "1"})
    assert found[1]["graphs"] == found[0]["graphs"] > 3, found


@pytest.mark.soak
def test_who_shares_layers_in_another_place_compiles_anew(tmp_path: Path) -> None:
    """Which words of the vocabulary a rank has is a constant of its graphs, that torch does not look at again."""
    run(tmp_path, "plain", 2, *TP2)
    found = run(tmp_path, "rehearsed", 2, *TP2, env={"REHEARSES": "0"})
    graphs = {one["rank"]: one["graphs"] for one in found if "step" in one}
    assert graphs[0] == 0 < graphs[1], found
    assert steps(tmp_path, "rehearsed") == steps(tmp_path, "plain")


def test_a_spare_rehearses_and_the_rank_that_it_becomes_compiles_nothing(tmp_path: Path) -> None:
    """A real standby, spare and orders; the rest of the file knows the rehearsal alone."""
    flags = ("--compile", "--bf16", "--train-iters=3")
    plain = run(tmp_path, "plain", 1, "--num-layers=2")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.run.spared", *training(tmp_path, "spared", *flags, script=())],
        cwd=ROOT,
        env={name: one for name, one in os.environ.items() if name not in warmup.WATCHED},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rehearse" not in done.stderr, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["graphs"] for one in found] == [0] * 3, (found, plain)
    assert found[0]["objects"] < plain[0]["objects"] / 3, (
        "what was rehearsed is no garbage to look for"
    )
    assert steps(tmp_path, "spared") == steps(tmp_path, "plain")


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_what_fails_midway_leaves_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could say of which of its settings the rest is."""
    before, made = _graphs(), []

    def fails(*_: object) -> None:
        torch.compile(_twice)(torch.ones(2))
        made.append(_graphs() - before)
        raise MemoryError

    monkeypatch.setattr(rehearsal, "_run", fails)
    with pytest.raises(MemoryError):
        rehearsal.rehearse(rehearsal.argument(parse(FLAGS)), "cpu")
    torch.compile(_twice)(torch.ones(2))
    assert made == [1]
    assert _graphs() == before + 2


def test_the_switches_of_a_rehearsal_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "deterministic", True)
    with kernels.kept(), attention.kept():
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_flash_sdp(False)
        torch._inductor.config.deterministic = False
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    assert torch._inductor.config.deterministic


def _graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _twice(one: torch.Tensor) -> torch.Tensor:
    return one + one


FLAGS = (*SMALL, "--train-iters=3", "--compile", "--bf16")
TOLD = {one.name for name in rehearsal.TOLD for one in fields(subjects()[name])}


@pytest.mark.parametrize("name", sorted(TOLD & SHOWN.keys()))
def test_what_a_spare_is_told_is_how_the_rank_computes(name: str, tmp_path: Path) -> None:
    shown = SHOWN[name]
    words = f"{TINY} {shown.beside} {shown.more}".replace(OPS, "")
    settings = parse(words_of(words, tmp_path))
    told = json.loads(rehearsal.argument(settings))["settings"]
    again = parse([], args_defaults=told)
    for subject in rehearsal.TOLD:
        assert getattr(again, subject) == getattr(settings, subject)


def test_positions_are_reset_in_a_rehearsal_and_no_data_are_named() -> None:
    data = ("--mock-data=false", "--data-path", "p", "--data-storage-options", '{"key": "secret"}')
    argument = rehearsal.argument(parse([*FLAGS, *data, "--reset-position-ids"]))
    assert "secret" not in argument
    assert parse([], args_defaults=json.loads(argument)["settings"]).data.reset_position_ids

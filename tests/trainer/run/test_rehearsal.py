"""A spare that has rehearsed: the rank that it becomes compiles nothing, and computes the same bits."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic.trainer import pretrain_gpt
from elastic.trainer.run import rehearsal
from tests.trainer.launch import ROOT, finish, start, steps

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
        pytest.param(1, (), id="exact"),
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


OWN = """
from elastic.trainer import pretrain_gpt
from elastic.trainer.run import rehearsal
def own(): ...
assert rehearsal.argument([], [pretrain_gpt.model_provider, own], {}) == ""
"""


def test_what_another_process_cannot_import_is_not_rehearsed(tmp_path: Path) -> None:
    def local() -> None: ...

    functions = [pretrain_gpt.model_provider, pretrain_gpt.forward_step]
    assert "pretrain_gpt:forward_step" in rehearsal.argument([], functions, {})
    assert not rehearsal.argument([], [*functions, local], {})
    assert not rehearsal.argument([], [*functions, lambda parser: parser], {})
    script = tmp_path / "train.py"
    script.write_text(OWN)
    subprocess.run(
        [sys.executable, str(script)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )

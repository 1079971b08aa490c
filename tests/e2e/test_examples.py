"""The examples as a reader runs them; a rank is killed, and nothing of it is seen in the end."""

import difflib
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest
from tests.e2e.harness import ROOT, SCRIPT, Job

EXAMPLES = ROOT / "examples"
KILLED = SCRIPT.parent / "killed.py"
SHORT = {"plain": ("--epochs=2",), "fsdp2": ("--steps=80",)}
LAST = {"plain": 128, "fsdp2": 80}
KILLED_AT = {"plain": 70, "fsdp2": 25}
"""Rank 1, in its save of that step."""


def start(job: Job, name: str, save: Path, *before: str) -> None:
    entry = (str(EXAMPLES / f"{name}.py"), *SHORT[name], f"--checkpoint={save}")
    job.start(entry=(*before, *entry))


def losses(printed: str) -> dict[str, str]:
    """What it printed of each step, the last time."""
    return dict(re.findall(r"step (\d+) \| loss ([\d.]+)", printed))


def tensors(save: Path, step: int) -> dict[tuple[str, str], torch.Tensor]:
    """All that is on storage of a step, by file and name."""
    found = {}
    for shard in manifests.read(Folder(Path(save)), step).shards:
        with safe_open(save / manifest.folder(step) / shard.file, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 it is no dict
                if not name.startswith("elastic.sums"):
                    found[str(shard.rank), name] = file.get_tensor(name)
    return found


@pytest.mark.parametrize("name", ["plain", pytest.param("fsdp2", marks=pytest.mark.soak)])
def test_a_killed_rank_leaves_no_trace_in_what_is_learnt(job: Job, name: str) -> None:
    start(job, name, job.folder / "whole")
    job.ends(0)
    whole = job.nodes[0].printed()

    killed = (str(KILLED), str(job.folder / "mark"), str(KILLED_AT[name]))
    start(job, name, job.folder / "killed", *killed)
    node = job.nodes[1]
    job.ends(0)

    assert job.report()["restarts_by_cause"] == {"killed": 1}
    assert re.search(r"round 3 goes on from step [1-9]\d*, in memory", node.said()), job.dump()
    assert losses(node.printed()) == losses(whole)
    first, second = (tensors(job.folder / save, LAST[name]) for save in ("whole", "killed"))
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key


@pytest.mark.parametrize("name", ["plain", "fsdp2"])
def test_what_elastic_adds_is_under_twenty_lines(name: str) -> None:
    before, after = (
        (EXAMPLES / file).read_text().splitlines() for file in (f"{name}_before.py", f"{name}.py")
    )
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(b - a, d - c) for kind, a, b, c, d in edits if kind != "equal")
    assert 0 < changed < 20
    assert f"| {changed} |" in (EXAMPLES / "README.md").read_text()

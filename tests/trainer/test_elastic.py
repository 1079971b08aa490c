"""Jobs that are killed and resized end with the bits of the one that never was."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.launch import assert_same, finish, start

FAULTY = ("-m", "tests.trainer.faulty")
STEPS = 12
COMPARED = "--check-weight-hash-across-dp-replicas-interval=1"
"""Replicas are, behind each step: nothing is said of them, and no bit changes."""
PHASES = ("forward", "backward", "optimizer", "save", "restore", "evaluate")


def struck(folder: Path) -> list[str]:
    """Phases in which a rank was killed, in order."""
    notes = sorted(folder.iterdir(), key=lambda note: int(note.name.partition("-")[0]))
    return [note.name.partition("-")[2].partition("@")[0] for note in notes]


def run(base: Path, save: str, ranks: int, faults: str, *flags: str) -> str:
    """To the end of its part, through `faults`."""
    folder = base / f"{save}-faults"
    folder.mkdir(exist_ok=True)
    before = len(struck(folder))
    part = sum(1 for _ in base.glob(f"{save}-part*"))
    (base / f"{save}-part{part}").touch()
    env = {
        "FAULTS": faults, "FAULTS_FOLDER": str(folder), "CONSUMED": str(base / f"{save}-consumed"),
        "PART": str(part), "ELASTIC_RANK_START": "auto",
    }  # fmt: skip
    output = finish(start(base, save, *flags, nproc=ranks, script=FAULTY, env=env))
    assert len(struck(folder)) == max(before, len(faults.split())), output
    return output


def consumed(base: Path, save: str) -> dict[int, list[list[Any]]]:
    """Of each step the samples that counted, as its last life had them in which every rank finished it: what came of
    the others was lost with them."""
    lives: dict[tuple[int, tuple[int, ...]], list[Any]] = {}
    for line in map(json.loads, (base / f"{save}-consumed").read_text().splitlines()):
        lives.setdefault((line["step"], tuple(line["life"])), []).append(line)
    whole = {key: lines for key, lines in lives.items() if len(lines) == lines[0]["ranks"]}
    newest = {step: max(life for other, life in whole if other == step) for step, _ in whole}
    return {
        step: sorted(one for line in whole[step, life] for one in line["samples"])
        for step, life in newest.items()
    }


def assert_consumed(base: Path) -> None:
    """No sample is lost, and none trained on twice, by its place and by its tokens."""
    whole, resized = consumed(base, "whole"), consumed(base, "resized")
    assert sorted(resized) == list(range(STEPS))
    assert resized == whole
    places = [place for step in range(STEPS) for place, _ in resized[step]]
    assert places == list(range(len(places)))


Part = tuple[int, str, int]
"""Replicas, faults, and the steps that are finished when it ends."""
RESIZED: dict[str, tuple[Part, ...]] = {
    "2, 3": ((2, "evaluate@2:1 restore@0:0 end@5:0", 5), (3, "save@6:2", STEPS)),
    "4, 5, 7, 3": (
        (4, "forward@1:3", 3), (5, "backward@4:1 restore@0:2", 6), (7, "optimizer@7:6 evaluate@8:2", 9),
        (3, "save@10:0", STEPS),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "parts", [RESIZED["2, 3"], pytest.param(RESIZED["4, 5, 7, 3"], marks=pytest.mark.soak)], ids=RESIZED
)  # fmt: skip
def test_any_number_of_replicas_with_a_kill_in_many_phases(
    tmp_path: Path, parts: tuple[Part, ...]
) -> None:
    """In all six of the longer one; a job under fire has the others by default, too."""
    length = (f"--train-iters={STEPS}", "--eval-iters=1", "--eval-interval=2")
    run(tmp_path, "whole", parts[0][0], "", *length)
    faults = ""
    for ranks, more, until in parts:
        faults = f"{faults} {more}"
        output = run(
            tmp_path, "resized", ranks, faults, *length, COMPARED, f"--exit-interval={until}"
        )
        assert f"iteration {until:8d}/" in output
        assert f"iteration {until + 1:8d}/" not in output, (
            "ranks that are killed at its end go no further"
        )
        assert f"Weight hashes match after {until} iterations" in output
    wanted = [fault.partition("@")[0] for fault in faults.split()]
    assert struck(tmp_path / "resized-faults") == wanted
    assert_same(tmp_path, "whole", "resized")
    assert_consumed(tmp_path)


def test_the_longer_one_has_a_kill_in_each_phase() -> None:
    faults = " ".join(more for _, more, _ in RESIZED["4, 5, 7, 3"])
    assert sorted(fault.partition("@")[0] for fault in faults.split()) == sorted(PHASES)

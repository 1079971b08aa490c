"""Jobs that are killed and resized end with the bits of the one that never was."""

from pathlib import Path

from tests.trainer.launch import assert_same, finish, start

FAULTY = ("-m", "tests.trainer.faulty")
STEPS = 12
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
    env = {"FAULTS": faults, "FAULTS_FOLDER": str(folder)}
    output = finish(start(base, save, *flags, nproc=ranks, script=FAULTY, env=env))
    assert len(struck(folder)) == max(before, len(faults.split())), output
    return output


def test_4_5_7_3_replicas_with_a_kill_in_each_phase(tmp_path: Path) -> None:
    length = (f"--train-iters={STEPS}", "--eval-iters=1", "--eval-interval=2")
    finish(start(tmp_path, "whole", *length, nproc=4))
    faults = ""
    parts = [
        (4, "forward@1:3", 3), (5, "backward@4:1 restore@0:2", 6), (7, "optimizer@7:6 evaluate@8:2", 9),
        (3, "save@10:0", STEPS),
    ]  # fmt: skip
    for ranks, more, until in parts:
        faults = f"{faults} {more}"
        output = run(tmp_path, "resized", ranks, faults, *length, f"--exit-interval={until}")
        assert f"iteration {until:8d}/" in output
    assert sorted(struck(tmp_path / "resized-faults")) == sorted(PHASES)
    assert_same(tmp_path, "whole", "resized")

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.watch import progress
from elastic.trainer.watch.progress import Progress

NOW = datetime(2026, 11, 23, 7, 5, 9)


def test_lines_are_megatrons() -> None:
    assert progress.started(NOW, job="42", devices=4) == (
        "2026-11-23 07:05:09\tJob ID: 42\t# GPUs: 4\tStarting job\n"
    )
    line = progress.saved(
        NOW, job="", devices=4, iteration=250, since_start=(4e15, 10.0), in_all=(3.2e16, 40.0),
        tokens=1_250_000_000,
    )  # fmt: skip
    assert line == (
        "2026-11-23 07:05:09\tJob ID: \t# GPUs: 4\tSaved checkpoint\tIteration: 250\t"
        "Job throughput: 100.0 TFLOP/s/GPU\tCumulative throughput: 200.0 TFLOP/s/GPU\t"
        "Floating-point operations: 3.20e+16\tTokens (in billions): 1.25\n"
    )


def test_each_life_adds_its_lines(tmp_path: Path) -> None:
    for tokens in (0, 1000):
        life = Progress(tmp_path / "new", job="", devices=1, flops=2e9, tokens=tokens)
        life.saved(5, tokens + 1000)
    lines = (tmp_path / "new" / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in lines] == ["Starting job", "Saved checkpoint"] * 2
    assert lines[3].split("\t")[7] == "Floating-point operations: 4.00e+12"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--log-progress"):
        Progress(tmp_path / "file", job="", devices=1, flops=1.0, tokens=0)


def test_a_file_that_takes_no_more_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Progress(tmp_path, job="", devices=1, flops=1.0, tokens=0)
    (tmp_path / progress.FILE).unlink()
    (tmp_path / progress.FILE).mkdir()
    life.saved(5, 1000)
    assert "progress.txt: a line is lost: Is a directory" in caplog.text


def test_lives_take_from_their_start_to_their_last_checkpoint() -> None:
    def at(minutes: int, what: str) -> str:
        return progress._line(NOW + timedelta(minutes=minutes), "", 1, what)

    text = at(0, "Starting job") + at(3, "Saved checkpoint\tx") + at(5, "Saved checkpoint\tx")
    assert progress.earlier(text) == 300
    assert progress.earlier(f"half a li\n{text}{at(60, 'Starting job')}") == 300
    assert progress.earlier("") == 0

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.watch import jsonl
from elastic.trainer.watch.report import Speed, Step, Tally, metrics

STEP = Step(
    iteration=7, consumed=56, batch_size=8, learning_rate=1e-3, losses={"lm loss": 3.5},
    sources={"code": 3.0}, grad_norm=0.5,
)  # fmt: skip
SPEED = Speed(seconds=0.5, tokens=1e4, throughput=1.5)


def test_a_line_a_step_and_the_last_one_of_a_step_holds(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    for loss in (4.0, 3.5):
        file = jsonl.Metrics(path)
        step = replace(STEP, losses={"lm loss": loss})
        for number in (8, 7):
            one = replace(step, iteration=number)
            file.write("step", metrics(one, Tally().add(one), SPEED))
        file.write("verdict", {"text": "odd"})
        file.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 6
    first = json.loads(lines[0])
    assert first.pop("time") > 1.7e9
    assert first == {
        "kind": "step", "round": 0, "iteration": 8, "consumed": 56, "batch_size": 8,
        "learning_rate": 1e-3, "losses": {"lm loss": 4.0}, "sources": {"code": 3.0},
        "grad_norm": 0.5, "loss_scale": 1.0, "world_size": 1, "skipped": 0, "skipped_samples": 0,
        "nan": 0, "steps": 1, "seconds": 0.5, "tokens_per_second": 1e4, "tflops_per_device": 1.5,
    }  # fmt: skip
    found = jsonl.steps(path)
    assert list(found) == [7, 8]
    assert [line["losses"]["lm loss"] for line in found.values()] == [3.5, 3.5]


def test_half_a_line_of_a_killed_run_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "iteration": 1}\n{"kind": "step", "itera')
    file = jsonl.Metrics(path)
    file.write("step", {"iteration": 2})
    file.write("step", {"iteration": 3})
    assert list(jsonl.steps(path)) == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 4


def test_what_json_has_no_number_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    jsonl.Metrics(path).write("step", {"iteration": 1, "losses": {"a": math.nan, "b": -math.inf}})
    assert '{"a": "NaN", "b": "-Infinity"}' in path.read_text()
    (line,) = jsonl.read(path)
    assert math.isnan(line["losses"]["a"])
    assert line["losses"]["b"] == -math.inf


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=r"--metrics-file .*x.jsonl cannot be written: .*name another"
    ):
        jsonl.Metrics(tmp_path / "file" / "x.jsonl")


def test_a_full_disk_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    file = jsonl.Metrics(Path("/dev/full"))
    file.write("step", {"iteration": 1})
    assert "a line is lost: No space left on device" in caplog.text


def test_the_jobs_folder_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error_file = tmp_path / "attempt_0" / "3" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    monkeypatch.delenv("ELASTIC_MARK", raising=False)
    assert jsonl.default_path() is None, "torchrun's folders are not ours"
    monkeypatch.setenv("ELASTIC_MARK", "job/node/1")
    assert jsonl.default_path() == tmp_path / "metrics.jsonl"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert jsonl.default_path() is None

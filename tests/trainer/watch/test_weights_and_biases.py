import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic.trainer.watch.weights_and_biases import WandbRun

ARGUMENTS = {"lr": 0.1, "data_path": ["a"], "params_dtype": torch.bfloat16, "seed": None}
STAND_IN = """
import json, pathlib
CALLS = pathlib.Path(__file__).with_name("calls.jsonl")
def note(*call):
    with CALLS.open("a") as file: file.write(json.dumps(call) + "\\n")
class Run:
    def log(self, values, step): note("log", values, step)
    def finish(self): note("finish")
def init(**settings):
    note("init", settings)
    return Run()
"""


def test_a_missing_package_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = WandbRun(project="gpt", name="125m", arguments={})
    run.add({"lm loss": 1.0}, 1)
    run.close()
    assert [record.getMessage() for record in caplog.records] == [
        "--wandb-project gpt has no effect: pip install wandb"
    ]


def test_every_life_goes_on_with_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    for of in ("/a", "/a", "/b"):
        run = WandbRun(
            project="gpt", name="125m", entity="team", folder="/w", of=of, arguments=ARGUMENTS
        )
        run.add({"lm loss": 1.0}, 3, 24)
        run.close()
    del sys.modules["wandb"]
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert calls[1:3] == [["log", {"lm loss": 1.0, "samples vs steps": 24}, 3], ["finish"]]
    first, second, other = (call[1] for call in calls if call[0] == "init")
    assert first == second
    assert first | {"id": ""} == {
        "project": "gpt", "name": "125m", "entity": "team", "dir": "/w", "id": "", "resume": "allow",
        "config": {"lr": 0.1, "data_path": ["a"], "params_dtype": "torch.bfloat16", "seed": None},
        "allow_val_change": True,
    }  # fmt: skip
    assert first["id"] != other["id"]


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("init", "api_key not configured Log in; is there a login (wandb login), or is WANDB_MODE=offline meant?"),
        ("log", "api_key not configured Log in"),
        ("finish", "api_key not configured Log in"),
    ],
)  # fmt: skip
def test_what_fails_there_is_one_line_and_ends_nothing(
    fails: str, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(name: str) -> Callable[..., Any]:
        def done(*_: object, **__: object) -> Any:
            if name == fails:
                raise ValueError("api_key not configured\n  Log in")
            return SimpleNamespace(log=call("log"), finish=call("finish"))

        return done

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=call("init")))
    run = WandbRun(project="gpt", name="125m", arguments={})
    run.add({"lm loss": 1.0}, 1)
    run.add({"lm loss": 1.0}, 2)
    run.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"--wandb-project gpt has no effect from here on: {said}"
    ]


LIVES = """
import sys
from elastic.trainer.watch.weights_and_biases import WandbRun
for step in (1, 2):
    run = WandbRun(project="gpt", name="125m", folder=sys.argv[1], of="/a", arguments={"world_size": 40 + step})
    run.add({"lm loss": step + 0.25}, step, 8 * step)
    run.close()
"""


def test_what_the_real_package_writes_offline_has_our_numbers(tmp_path: Path) -> None:
    """Where `wandb` is installed; it is no dependency."""
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path)], env=environment, check=True, timeout=120
    )
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1, "both lives go on with one run"
    written = b"".join(file.read_bytes() for file in files)
    for text in (b"lm loss", b"1.25", b"2.25", b"samples vs steps", b"16", b"world_size", b"42"):
        assert text in written

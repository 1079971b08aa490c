"""What a script says to its agent, and that it says it in vain, and unharmed, without one."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic import session
from elastic.proto.errors import UsageError
from tests.agent.small_agent import ROOT, SmallAgent, base_environment, rank_spec

pytestmark = pytest.mark.xdist_group("session")


@pytest.fixture(scope="module")
def agent() -> Iterator[SmallAgent]:
    agent = SmallAgent()
    agent.launch("spawner")
    yield agent
    agent.close()


def write(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nfrom elastic import session\n{text}"
    )
    return str(path)


def test_outside_elastic_run_nothing_happens(tmp_path: Path) -> None:
    text = """
session.step(1); session.phase("x"); session.declare_rank_unit(3)
print(session.current(), "torch" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, write(tmp_path, text)],
        env=base_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (found.stdout, found.stderr) == ("None False\n", "")


def test_rank_tells_and_knows(agent: SmallAgent, tmp_path: Path) -> None:
    text = """
import dataclasses, json
session.step(41); session.phase("evaluate"); session.step(42)
print(json.dumps(dataclasses.asdict(session.current())))
"""
    found = agent.start("spawner", target=write(tmp_path, text))
    assert found["exit"] == 0, found["stderr"]
    assert (found["progress"]["step"], found["progress"]["phase"]) == (42, "evaluate")
    assert found["progress"]["owner"] == found["pid"]
    assert json.loads(found["stdout"]) == {
        "job": "job",
        "uid": "1f0c2a9b",
        "launch": "",
        "node": "node-0",
        "round": 3,
        "rank": 1,
        "local_rank": 1,
        "world_size": 4,
        "local_world_size": 2,
    }


def test_children_of_a_rank_say_nothing(agent: SmallAgent, tmp_path: Path) -> None:
    text = """
import os
session.step(1)
if os.fork() == 0:
    session.step(99); session.phase("child"); session.declare_rank_unit(7)
    os._exit(0)
os.wait()
"""
    found = agent.start("spawner", target=write(tmp_path, text))
    assert (found["progress"]["step"], found["progress"]["phase"]) == (1, "")
    assert found["link"] == [{"kind": "FirstStep", "step": 1}]  # the rank's own, once


def ask(agent: SmallAgent, path: str, answer: str) -> dict[str, object]:
    return agent.ask(verb="start", starter="spawner", spec=rank_spec(target=path), answer=answer)


def test_rank_unit(agent: SmallAgent, tmp_path: Path) -> None:
    path = write(tmp_path, "session.declare_rank_unit(2)\nprint('on')")
    fine = ask(agent, path, "")
    assert fine["link"] == [{"kind": "UnitAsked", "ranks": 2}]
    assert (fine["exit"], fine["stdout"]) == (0, "on\n")
    refused = ask(agent, path, "3 ranks are no multiple of 2")
    assert (refused["exit"], refused["stdout"]) == (1, "")
    assert "UsageError: 3 ranks are no multiple of 2" in str(refused["stderr"])


def test_impossible_unit() -> None:
    with pytest.raises(UsageError, match="1 or more"):
        session.declare_rank_unit(0)


@pytest.mark.parametrize(
    "function", ["", "package", "package.module:", ":function", "a:b:c", "a b:c", "a:B.c"]
)
def test_a_rehearsal_that_no_spare_could_find(function: str) -> None:
    with pytest.raises(UsageError, match=r"package\.module:function"):
        session.set_rehearsal(function, "")


def test_a_rehearsal_with_too_much_to_say() -> None:
    with pytest.raises(UsageError, match="up to 65536 bytes"):
        session.set_rehearsal("package:function", "\u00e9" * 40_000)

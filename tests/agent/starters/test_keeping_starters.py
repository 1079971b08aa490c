"""Starters that cannot start, are of no use any more, or do not end."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness.freezer import Freezer

ROOT = Path(__file__).parents[3]


class Program:
    """tests/agent/starters/starters_program.py, while it runs one of its cases."""

    def __init__(self, case: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.agent.starters.starters_program", case],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> Any:
        """Its next line; a frozen child of its keeps the stream open, so there may be no end."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def hears(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        with self._process:  # which closes its streams
            pass


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    made = Program(request.param)
    yield made
    made.close()


case = functools.partial(pytest.mark.parametrize, "program", indirect=True)


@case(["momentary"])
def test_a_momentary_lack_does_not_end_forking(program: Program) -> None:
    assert program.says() == ["spawner", "standby", ""]


@case(["lasting"])
def test_a_standby_that_is_no_use_any_more_is_ended_and_not_built_again(program: Program) -> None:
    assert program.says() == ["spawner", "spawner", True, False, "nursery", False, 2]


@case(["stuck"])
def test_another_spawner_takes_the_place_of_one_that_no_signal_ends(
    program: Program, freezer: Freezer
) -> None:
    freezer.freeze(program.says())
    program.hears("it is frozen")
    assert program.says() == ["spawner", "spawner", False]


@case(["nursery"])
def test_stores_are_forked_where_ranks_are_spawned(program: Program) -> None:
    assert program.says() == ["spawner", False, False, "nursery", True, "spawner", False, "nursery"]


@case(["late"])
def test_a_nursery_that_is_not_ready_in_time_is_not_waited_for_again(program: Program) -> None:
    assert program.says() == ["spawner", "spawner", True, "nursery"]


@case(["threads"])
def test_a_nursery_with_a_second_thread_is_of_no_use(program: Program) -> None:
    assert program.says() == ["spawner", False]


@case(["mortal"])
def test_a_nursery_that_dies_three_times_is_not_built_again(program: Program) -> None:
    assert program.says() == ["spawner", 3]


@case(["mortal_standby"])
def test_a_standby_for_all_ranks_that_is_never_ready_gives_way_to_the_spawner(
    program: Program,
) -> None:
    why = "the standby died three times as soon as it was built"
    assert program.says() == ["spawner", 3, why]


@case(["long"])
def test_a_standby_for_all_ranks_is_waited_for_aloud(program: Program) -> None:
    late = "ranks wait for the standby, whose imports take more than 0.1 s"
    assert program.says() == [late, False, "standby"]


@case(["reaped"])
def test_a_process_that_was_reaped_before_its_start_was_known(program: Program) -> None:
    assert program.says() == ["spawner"]

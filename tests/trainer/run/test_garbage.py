"""Who collects garbage, and when."""

import gc
import subprocess
import sys
import weakref

import pytest

from elastic.trainer.run import garbage


class Circle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


def test_it_is_collected_behind_the_first_step_and_then_behind_every_fiftieth() -> None:
    found = []
    with garbage.collected() as collect:
        for step in range(7, 120):
            dropped = weakref.ref(Circle())
            assert not gc.isenabled()
            collect(step)
            if dropped() is None:
                found.append(step)
    assert found == [7, 50, 100]


def test_it_is_python_again_afterwards() -> None:
    def fails() -> None:
        with garbage.collected() as collect:
            collect(1)
            assert gc.get_freeze_count() > 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_nothing_is_looked_for_when_the_process_ends() -> None:
    text = """
from elastic.trainer.run import garbage

class Circle:
    def __init__(self):
        self.me = self
    def __del__(self):
        print("found")

with garbage.collected() as collect:
    Circle()
    collect(1)
Circle()
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ended.stdout == "found\n", "of the first step, and no other"

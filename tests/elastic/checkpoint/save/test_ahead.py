"""Slots that a spare rank registers ahead: found by the rank that it becomes, and let go with the rest."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.checkpoint.memory import host, lanes
from elastic.checkpoint.save import ahead
from elastic.checkpoint.save.ahead import Ahead
from elastic.checkpoint.save.slots import PART, Slots
from elastic.proto import slot

SIZE = 2 * PART + slot.PAGE
"""Three parts."""


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [slot.create(SIZE) for _ in range(3)]
    yield made
    for fd in made:
        os.close(fd)


def mapped(fds: list[int]) -> list[int]:
    """Those of them that this process maps."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    inodes = {int(line.split()[4]) for line in lines if "elastic-slot" in line}
    return [number for number, fd in enumerate(fds) if os.fstat(fd).st_ino in inodes]


def show(one: Ahead, fds: list[int]) -> None:
    one.show([os.dup(fd) for fd in fds])


def parts(fd: int) -> list[int]:
    """The bytes of each that is registered, from the beginning on."""
    view = host.shared(fd)
    found: list[int] = []
    for at in range(0, SIZE, PART):
        found += map(len, lanes.registered(view[at : at + PART]) or ())
    return found


def test_what_is_registered_ahead_is_what_the_rank_gets(fds: list[int]) -> None:
    one = ahead.begin("cpu")
    show(one, fds)
    while one.go_on():
        pass
    slots = Slots([os.dup(fd) for fd in fds[:2]], 2, lanes.Host())
    assert slots.prepared == 2, "nothing is left to be done"
    ahead.settle(slots.views)
    slots.prepare(0)
    del one
    assert parts(fds[0]) == [PART, PART, slot.PAGE]
    assert mapped(fds) == [0, 1], "what the rank has no use for is let go"
    slots.close()
    assert parts(fds[0]) == []
    assert mapped(fds) == []


def test_orders_come_before_all_is_registered(fds: list[int]) -> None:
    one = ahead.begin("cpu")
    show(one, fds[:1])
    assert one.go_on()
    slots = Slots([os.dup(fds[0])], 2, lanes.Host())
    ahead.settle(slots.views)
    assert slots.prepared == 0
    assert parts(fds[0]) == [PART]
    slots.prepare(0)
    assert parts(fds[0]) == [PART, PART, slot.PAGE]
    slots.close()


def test_slots_that_are_dropped_are_forgotten_registered_or_not(fds: list[int]) -> None:
    one = Ahead(lanes.Host())
    show(one, fds[:2])
    for _ in range(4):  # all of the first, and a part of the second
        assert one.go_on()
    show(one, fds[2:])
    assert mapped(fds) == [2]
    assert parts(fds[0]) == parts(fds[1]) == []
    show(one, fds[1:])
    while one.go_on():
        pass
    assert parts(fds[1]) == parts(fds[2]) == [PART, PART, slot.PAGE]
    show(one, [])
    assert mapped(fds) == []
    assert not one.go_on()


def test_a_process_that_was_no_spare_has_nothing_to_settle(fds: list[int]) -> None:
    slots = Slots([os.dup(fds[0])], 1, lanes.Host())
    ahead.settle(slots.views)
    assert slots.prepared == 0
    slots.close()

"""Threads that share a list; memory that is mapped once, and at an address that huge pages fit."""

import gc
import os
import subprocess
import sys
from threading import Event, local

import pytest

from elastic.checkpoint.memory import host
from elastic.proto import slot

TIMEOUT = 60.0


@pytest.mark.parametrize("count", [1, 3, 20])
def test_results_are_in_the_items_order(count: int) -> None:
    assert host.each(lambda n: n * n, range(9), count) == [n * n for n in range(9)]
    assert host.each(str, [], count) == []


def test_who_is_done_takes_the_next_and_waits_for_nobody() -> None:
    others_are_done, left = Event(), set(range(1, 9))

    def work(number: int) -> bool:
        left.discard(number)
        if not left:
            others_are_done.set()
        return number > 0 or others_are_done.wait(TIMEOUT)

    assert all(host.each(work, range(9), 2))


@pytest.mark.parametrize("count", [1, 3])
def test_each_thread_enters_first(count: int) -> None:
    here = local()

    def enter() -> None:
        here.entered = True

    assert all(host.each(lambda _: hasattr(here, "entered"), range(9), count, enter))
    assert not hasattr(here, "entered"), "who calls is none of them"


@pytest.mark.parametrize("count", [1, 2])
def test_what_one_fails_with_is_raised(count: int) -> None:
    def work(number: int) -> None:
        if number == 4:
            raise ValueError("the fifth")

    with pytest.raises(ValueError, match="the fifth"):
        host.each(work, range(9), count)


def test_once_one_has_failed_nothing_more_is_taken() -> None:
    taken: list[int] = []

    def work(number: int) -> None:
        taken.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        host.each(work, range(9), 1, lambda: None)
    assert taken == [0]


ENDING = """
import threading
from concurrent.futures import ThreadPoolExecutor, thread
from elastic.checkpoint.memory import host

def late():
    while not thread._shutdown:  # it waits for us then, and nobody starts threads any more
        threading.Event().wait(0.001)
    print(host.each(lambda item: 2 * item, range(5), 3))

ThreadPoolExecutor(1).submit(late)
"""


def test_what_is_under_way_as_a_script_ends_is_done_all_the_same() -> None:
    """A snapshot, whose copy has threads of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("[0, 2, 4, 6, 8]\n", "")


def test_a_memfd_is_mapped_once_and_for_huge_pages() -> None:
    fd, other = (slot.create(3 * host.HUGE + slot.PAGE) for _ in range(2))
    again = os.dup(fd)
    view = host.shared(fd)
    assert host.shared(again) is view
    assert len(view) == os.fstat(fd).st_size
    assert host.address_of(view) % host.HUGE == 0
    assert host.address_of(host.shared(other)) != host.address_of(view)
    view[-1] = 7
    assert os.pread(fd, 1, len(view) - 1) == b"\7"
    part = view[-2:]
    del view
    gc.collect()
    assert part[1] == 7  # as long as somebody has a part of it
    host.shared(fd)[-1] = 8
    assert part[1] == 8
    for one in (fd, again, other):
        os.close(one)


@pytest.mark.parametrize("huge", [True, False])
def test_what_a_slot_holds_outlives_its_touching(huge: bool) -> None:
    size = 2 * host.HUGE + slot.PAGE
    fd = slot.create(size)
    wrote = bytes(range(256)) * (size // 256)
    os.pwrite(fd, wrote, 0)
    view = host.shared(fd)
    assert host.populate(view, write=True, huge=huge) == 0
    assert view == wrote
    os.close(fd)

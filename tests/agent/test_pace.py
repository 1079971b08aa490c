"""What a rank's steps take, from looks at its page."""

import os
import time

from elastic.agent.pace import Pace, Times, TimesOnDevice
from elastic.agent.ranks import Rank
from elastic.proto import page
from elastic.proto.page import Beat, DeviceStep

MS = 1_000_000


def beats(first: int, last: int, *, step: int = 10, waits: int = 4) -> list[Beat]:
    """Milliseconds."""
    return [Beat(n, n * step * MS, n * waits * MS) for n in range(first, last + 1)]


def test_intervals_end_at_multiples_of_their_length() -> None:
    pace = Pace()
    pace.hear(beats(1, 9), 5)
    assert pace.take() == Times(end=5, compute=0.006, waiting=0.004, least=0.004)
    assert pace.take() is None
    pace.hear(beats(10, 10), 5)
    told = pace.take()
    assert told is not None
    assert told.end == 10


def test_a_step_that_takes_ten_times_as_long_is_no_matter() -> None:
    pace = Pace()
    pace.hear(beats(1, 5), 10)
    late = [Beat(b.number, b.end_ns + 100 * MS, b.waited_ns - MS) for b in beats(6, 10)]
    pace.hear(late, 10)
    assert pace.take() == Times(end=10, compute=0.006, waiting=0.004, least=0.003)


def test_what_was_not_seen_is_left_out_and_most_of_an_interval_has_to_be() -> None:
    pace = Pace()
    pace.hear([*beats(1, 8), *beats(20, 40)], 20)
    told = pace.take()
    assert told is not None
    assert told.end == 40, "of the first twenty seven were seen"


def test_another_length_begins_anew() -> None:
    pace = Pace()
    pace.hear(beats(1, 9), 100)
    pace.hear(beats(10, 16), 8)
    assert pace.take() == Times(end=16, compute=0.006, waiting=0.004, least=0.004)
    pace.hear(beats(17, 40), 0)
    assert pace.take() is None, "nobody wants to know"


def test_beats_of_a_page() -> None:
    """The newest are kept; those that could be written over while they are read are none."""
    fd = page.create()
    writer = page.PageWriter.claim(fd, os.getpid())
    assert writer is not None
    seen = page.open_page(fd)
    assert page.beats(seen, 0) == []
    for number in range(1, 301):
        at = page.RING + 2 * (number % page.KEPT)
        writer.words[at], writer.words[at + 1] = 10 * number, number
        writer.words[page.BEATS] = number
        if number == 3:
            assert page.beats(seen, 1) == [Beat(2, 20, 2), Beat(3, 30, 3)]
    found = page.beats(seen, 3)
    assert [beat.number for beat in found] == list(range(300 - page.KEPT + 2, 301))
    assert found[-1] == Beat(300, 3000, 300)


def on_device(
    number: int, *, backward: int = 4, waits: int = 2, starved: bool = False
) -> DeviceStep:
    """Milliseconds."""
    return DeviceStep(number, 2 * MS, backward * MS, 1 * MS, waits * MS, starved)


def test_what_a_device_took_is_of_the_interval_in_which_it_was_heard() -> None:
    """A device is behind its host."""
    pace = Pace()
    pace.hear(beats(1, 8), 10)
    steps = [on_device(3), on_device(6, backward=40, waits=1, starved=True), on_device(7)]
    pace.hear_of_device(steps, 3)
    pace.hear(beats(9, 10), 10)
    told = pace.take()
    assert told is not None
    assert told.device == TimesOnDevice(
        compute=0.007, backward=0.004, waiting=0.002, least=0.001, starved=False
    )
    pace.hear_of_device([on_device(10, starved=True)], 4)
    assert pace.heard_of_device == 4
    pace.hear(beats(11, 20), 10)
    told = pace.take()
    assert told is not None
    assert told.device is not None
    assert told.device.starved
    pace.hear(beats(21, 30), 10)
    told = pace.take()
    assert told is not None
    assert told.device is None, "of this one nothing was heard"


def test_device_steps_of_a_page() -> None:
    fd = page.create()
    writer = page.PageWriter.claim(fd, os.getpid())
    assert writer is not None
    seen = page.open_page(fd)
    assert page.device_steps(seen, 0) == ([], 0)
    for count in range(1, 101):
        at = page.DEVICE_RING + page.DEVICE_RECORD * (count % page.DEVICE_KEPT)
        for offset, value in enumerate((3 * count, 1, 2, 3, 4, count % 2)):
            writer.words[at + offset] = value
        writer.words[page.DEVICE_STEPS] = count
        if count == 3:
            steps = [DeviceStep(6, 1, 2, 3, 4, False), DeviceStep(9, 1, 2, 3, 4, True)]
            assert page.device_steps(seen, 1) == (steps, 3)
    found, newest = page.device_steps(seen, 3)
    assert newest == 100
    assert [one.number for one in found] == [3 * n for n in range(100 - page.DEVICE_KEPT + 2, 101)]
    assert found[-1].compute_ns == 6
    assert page.DEVICE_RING + page.DEVICE_RECORD * page.DEVICE_KEPT == page.SIZE // 8


def test_a_rank_s_page_is_told_with_its_heartbeat() -> None:
    fd = page.create()
    writer = page.PageWriter.claim(fd, os.getpid())
    assert writer is not None
    rank = Rank(3, 1)
    rank.page = page.open_page(fd)
    os.close(fd)
    words = writer.words

    def beat(number: int, *device: int) -> None:
        at = page.RING + 2 * (number % page.KEPT)
        words[at], words[at + 1], words[page.BEATS] = 10 * MS * number, 0, number
        if device:
            count = words[page.DEVICE_STEPS] + 1
            place = page.DEVICE_RING + page.DEVICE_RECORD * (count % page.DEVICE_KEPT)
            for offset, value in enumerate((number, *device)):
                words[place + offset] = value
            words[page.DEVICE_STEPS] = count

    rank.interval = 4
    for number in range(1, 5):
        beat(number, 2 * MS, 4 * MS, 1 * MS, 3 * MS, 1)
    pace = rank.progress().pace
    assert (pace.end, pace.compute, pace.waiting) == (4, 0.01, 0.0)
    device = pace.device
    assert (device.compute, device.backward, device.waiting, device.least) == (
        0.007,
        0.004,
        0.003,
        0.003,
    )
    assert device.starved
    for number in range(5, 9):
        beat(number)
    told = rank.progress()
    assert told.pace.end == 8
    assert not told.pace.HasField("device"), "those before were told"
    words[page.TICKS], words[page.TICK_NS] = 1, time.monotonic_ns() - 1_000_000 * MS
    assert rank.progress().quiet > 900
    writer.tick()
    assert rank.progress().quiet < 900, "as its page says now, not when that was looked at last"
    rank.close()

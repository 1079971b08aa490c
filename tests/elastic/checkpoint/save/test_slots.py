"""Which slot is written over: never one that a later round may need, and always some in the end."""

import os
from collections.abc import Iterator

import pytest

from elastic.checkpoint.memory import host, lanes
from elastic.checkpoint.save.slots import PART, Content, GivenBack, Slots, choices, reusable
from elastic.checkpoint.state.image import Image, lay_out
from elastic.proto import slot, sums
from elastic.proto.moment import Moment
from elastic.proto.slot import Stamp
from elastic.proto.sums import Chunk


def test_the_oldest_is_tried_first_and_what_is_empty_before() -> None:
    moments = (Moment(2, 7), Moment(1, 9), None, Moment(2, 8))
    contents = [Content(moment=moment, whole=moment == Moment(2, 8)) for moment in moments]
    assert reusable(contents, 2, Moment(1, 9)) == [2, 1, 0]


def test_what_was_loaded_is_kept_until_this_round_has_something_whole() -> None:
    loaded = Content(moment=Moment(1, 9), whole=True)
    contents = [loaded, Content(moment=Moment(2, 10)), Content(moment=None)]
    assert reusable(contents, 2, loaded.moment) == [2]
    contents[1] = Content(moment=Moment(2, 10), whole=True)
    assert reusable(contents, 2, loaded.moment) == [2, 0]


def test_what_a_round_left_that_is_not_gone_on_from_is_void() -> None:
    """Else a round that dies each time once one rank has saved leaves no slot to the next."""
    contents = [Content(moment=Moment(1, 5), whole=True)]
    contents += [Content(moment=Moment(round_, 6)) for round_ in (1, 2, 3)]
    assert reusable(contents, 4, Moment(1, 5)) == [1, 2, 3]


def test_who_loads_nothing_keeps_what_may_be_whole() -> None:
    contents = [Content(moment=Moment(1, 5), whole=True), Content(moment=Moment(1, 6))]
    assert reusable(contents, 2, None) == []


# --- memory --------------------------------------------------------------------------------------

IMAGE = lay_out([], {}, 3)


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [slot.create(slot.bytes_for(IMAGE.nbytes)) for _ in range(3)]
    yield made
    for fd in made:
        os.close(fd)


def opened(fds: list[int]) -> Slots:
    return Slots([os.dup(fd) for fd in fds])


def write(slots: Slots, step: int, order: list[int], image: Image = IMAGE) -> int | None:
    def stamp(generation: int) -> Stamp:
        return Stamp(job="j", step=step, round=1, rank=0, world_size=1, generation=generation)

    draft = slots.begin(order, stamp, image)
    if draft is None:
        return None
    with draft:
        chunks, at = [], 0
        for end in image.chunk_ends():
            chunks.append(Chunk(end, sums.checksum(draft.image[at:end])))
            at = end
        draft.commit(chunks, (step,))
    return draft.index


def generations(fds: list[int]) -> list[int]:
    found = []
    for fd in fds:
        data = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
        found.append(slot.read(data).stamp.generation if data[:8] == slot.MAGIC else 0)
    return found


def test_a_slot_that_is_read_is_not_written(fds: list[int]) -> None:
    slots = opened(fds)
    assert write(slots, 1, [0]) == 0
    reader = slot.claim(fds[0], exclusive=False)
    assert reader is not None
    assert write(slots, 2, [0, 1]) == 1
    assert write(slots, 3, [0]) is None
    assert [c.moment for c in slots.contents()] == [Moment(1, 1), Moment(1, 2), None]
    os.close(reader)
    assert write(slots, 4, [0, 1]) == 0
    slots.close()


def test_nobody_reads_while_it_is_written(fds: list[int]) -> None:
    slots = opened(fds)
    stamp = Stamp(job="j", step=1, round=1, rank=0, world_size=1, generation=1)
    draft = slots.begin([0], lambda generation: stamp, IMAGE)
    assert draft is not None
    with draft:
        assert slot.claim(fds[0], exclusive=False) is None
    assert slots.contents()[0] == Content(moment=None)
    reader = slot.claim(fds[0], exclusive=False)
    assert reader is not None
    os.close(reader)
    slots.close()


def test_generations_grow_over_the_death_of_a_rank(fds: list[int]) -> None:
    first = opened(fds)
    assert [write(first, step, [step]) for step in range(3)] == [0, 1, 2]
    first.close()
    assert generations(fds) == [1, 2, 3]
    second = opened(fds)
    assert write(second, 3, [0]) == 0
    assert generations(fds) == [4, 2, 3]
    second.close()


def test_what_is_marked_whole_is_known_to_be(fds: list[int]) -> None:
    slots = opened(fds)
    write(slots, 5, [1])
    page = memoryview(bytearray(os.pread(fds[1], slot.PAGE, 0)))
    slot.mark_whole(page, 3)
    os.pwrite(fds[1], page, 0)
    assert slots.contents()[1] == Content(moment=Moment(1, 5), whole=True)
    assert slots.bytes == slot.bytes_for(IMAGE.nbytes)
    slots.close()


UNKNOWN = 9999
"""No kernel has this advice."""


@pytest.mark.parametrize("lacks", [(), ("_COLLAPSE",), ("_COLLAPSE", "_POPULATE_WRITE")])
def test_all_pages_of_a_prepared_slot_are_there_and_registered(
    monkeypatch: pytest.MonkeyPatch, lacks: tuple[str, ...]
) -> None:
    for advice in lacks:  # as of older kernels
        monkeypatch.setattr(host, advice, UNKNOWN)
    size = PART + 3 * slot.PAGE
    fd = slot.create(size)
    slots = Slots([os.dup(fd)], 2, lanes.Host())
    view = host.shared(fd)
    assert slots.prepared == 0
    assert lanes.registered(view) is None
    assert os.fstat(fd).st_blocks * 512 < PART
    for _ in range(2):
        slots.prepare(0)
    assert slots.prepared == 1
    assert os.fstat(fd).st_blocks * 512 >= size
    assert list(map(len, lanes.registered(view) or ())) == [PART, 3 * slot.PAGE]
    assert list(map(len, lanes.registered(view[PART - 5 : PART + 2]) or ())) == [5, 2]
    slots.close()
    assert lanes.registered(view[:1]) is None
    os.close(fd)


def test_what_is_prepared_is_written_first(fds: list[int]) -> None:
    slots = opened(fds)
    slots.prepare(1)
    assert write(slots, 1, [0, 1]) == 1
    slots.close()


def test_slots_that_are_given_up_are_prepared_no_more(fds: list[int]) -> None:
    slots = opened(fds)
    slots.give_up()
    with pytest.raises(GivenBack):
        slots.prepare(0)
    slots.close()


def test_what_is_still_to_go_to_storage_is_written_over_last() -> None:
    held = [
        Content(moment=Moment(1, 4), whole=True, due=True),
        Content(moment=Moment(1, 5), whole=True),
        Content(moment=Moment(1, 6), whole=True),
        Content(moment=None),
    ]
    assert reusable(held, 1, None) == [3, 1, 0]
    assert choices(held, 1, None) == ([3, 1], [0]), "and what takes its place goes there"

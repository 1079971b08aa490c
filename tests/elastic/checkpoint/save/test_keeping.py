"""A rank's connection to its keeper, used by two threads."""

import os
import socket
from collections.abc import Iterator
from threading import Thread

import pytest

from elastic.checkpoint.save.keeping import GONE, Keeping
from elastic.proto import keeper
from elastic.proto.errors import CheckpointError
from elastic.proto.moment import Moment


@pytest.fixture
def pair() -> Iterator[tuple[Keeping, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeping = Keeping(ours)
    yield keeping, theirs
    keeping.close()
    theirs.close()


def test_whoever_reads_reads_for_all(pair: tuple[Keeping, socket.socket]) -> None:
    keeping, theirs = pair
    found: list[object] = []
    waiting = [Thread(target=lambda: found.append(keeping.wait(0, 20))) for _ in range(2)]
    asking = Thread(target=lambda: found.append(keeping.ask(keeper.Need(bytes=5), 20)))
    for thread in (*waiting, asking):
        thread.start()
    assert keeper.receive_from_rank(theirs) == keeper.Need(bytes=5, question=1)
    keeper.send(theirs, keeper.Whole(round=1, step=2))
    keeper.send(theirs, keeper.Slots(count=0, question=1))
    keeper.send(theirs, keeper.Committed(round=1, step=2))
    for thread in (*waiting, asking):
        thread.join()
    assert sorted(map(repr, found)) == ["(Slots(count=0, question=1), [])", "True", "True"]
    keeping.drain()
    assert keeping.said == 2
    assert keeping.committed == Moment(1, 2)


def test_a_step_is_kept_before_it_is_waited_for(pair: tuple[Keeping, socket.socket]) -> None:
    """And nobody keeps it where nobody waits."""
    keeping, theirs = pair
    asked: list[str] = []

    def keep() -> str:
        asked.append("no space")
        return asked[-1]

    keeper.send(theirs, keeper.Leave(order=1, step=6))
    keeping.stay(5, keep)
    assert (keeper.receive_from_rank(theirs), asked) == (keeper.Saved(step=5), [])
    staying = Thread(target=keeping.stay, args=(6, keep))
    staying.start()
    waits = keeper.Saved(step=6, waits=1, lost="no space")
    assert keeper.receive_from_rank(theirs) == waits
    keeper.send(theirs, keeper.Leave(order=2, step=7))
    staying.join()
    assert keeper.receive_from_rank(theirs) == keeper.Saved(step=6)
    assert len(asked) == 1


def test_what_was_said_before_is_not_waited_for(pair: tuple[Keeping, socket.socket]) -> None:
    keeping, theirs = pair
    keeper.send(theirs, keeper.Whole(round=1, step=2))
    assert keeping.wait(0, 20)
    assert keeping.wait(0, 0)
    assert not keeping.wait(1, 0)


def test_every_thread_hears_of_the_end(pair: tuple[Keeping, socket.socket]) -> None:
    keeping, theirs = pair
    found: list[str] = []

    def wait() -> None:
        with pytest.raises(CheckpointError) as caught:
            keeping.wait(0, 20)
        found.append(str(caught.value))

    waiting = [Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    theirs.close()
    for thread in waiting:
        thread.join()
    assert found == [GONE] * 3


def test_a_refusal_is_an_answer_and_silence_is_none(pair: tuple[Keeping, socket.socket]) -> None:
    keeping, theirs = pair
    refused = keeper.Refused(reason="no memory", question=1)
    keeper.send(theirs, refused)
    assert keeping.ask(keeper.Need(bytes=5), 20) == (refused, [])
    with pytest.raises(CheckpointError, match="silent for 0 s"):
        keeping.ask(keeper.Need(bytes=5), 0)


def test_an_answer_that_comes_too_late_is_nobodys(pair: tuple[Keeping, socket.socket]) -> None:
    """Neither the next question's, nor does it leave descriptors behind."""
    keeping, theirs = pair
    with pytest.raises(CheckpointError, match="silent for 0 s"):
        keeping.ask(keeper.Need(bytes=5), 0)
    first = keeper.receive_from_rank(theirs)
    assert isinstance(first, keeper.Need)
    reading, writing = os.pipe()
    keeper.send(theirs, keeper.Slots(count=1, question=first.question), (writing,))
    os.close(writing)
    keeper.send(theirs, keeper.Slots(count=0, question=first.question + 2))
    answer, fds = keeping.ask(keeper.Need(bytes=6), 20)
    assert isinstance(answer, keeper.Slots)
    assert (answer.count, fds) == (0, [])
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b"", "nobody has the other end"
    os.close(reading)

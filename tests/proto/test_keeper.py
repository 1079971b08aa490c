"""Messages about snapshots: all of them arrive as they were sent, and no datagram does more than be
refused, nor leaves a descriptor behind."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.proto import datagrams, flusher, keeper
from elastic.proto.errors import CodecError, LinkError, ProtocolMismatch
from elastic.proto.terms import Terms

Pair = tuple[socket.socket, socket.socket]
shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

to_keeper = st.one_of(*(st.from_type(kind) for kind in get_args(keeper.ToKeeper)))
to_rank = st.one_of(*(st.from_type(kind) for kind in get_args(keeper.ToRank)))
to_flusher = st.one_of(*(st.from_type(kind) for kind in get_args(flusher.ToFlusher)))
to_agent = st.one_of(*(st.from_type(kind) for kind in get_args(flusher.ToAgent)))

HOSTILE = [
    b"x", b"\xff\xfe", b"null", b"1", b'"Open"', b"[]", b"{}", b"[" * 60_000, b'{"a":' * 12_000,
    b"{" * 60_000, b"9" * 60_000, b'{"":"Later"}', b'{"":["Need"]}', b'{"":null}', b'{"":{"":{}}}',
    b'{"":"Need"}', b'{"":"Need","bytes":"8"}', b'{"":"Need","bytes":true}', b'{"":"Need","bytes":8.0}',
    b'{"":"Need","bytes":' + b"9" * 5000 + b"}", b'{"":"Need","bytes":NaN}', b'{"":"Written","step":null}',
    b'{"":"Open"}', b'{"":"Slots","count":[]}', b'{"":"Whole","round":1}', b'{"":"Restore","round":{}}',
    b'{"":"Write","id":1}', b'{"":"Commit","id":1,"path":[["/"]]}', b'{"":"Done"}',
    b'{"":"Failed","id":1,"error":null}', b'{"":"Need","bytes":8}trailing', b" " * 70_000,
]  # fmt: skip


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(60)
        theirs.settimeout(60)
        gc.collect()
        gc.disable()  # what other tests have left open would go while this one counts
        yield ours, theirs
        gc.enable()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def same(fd: int, other: int) -> bool:
    return os.path.samestat(os.fstat(fd), os.fstat(other))


def memories(count: int) -> list[int]:
    return [os.memfd_create("test", os.MFD_CLOEXEC) for _ in range(count)]


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


@shared
@given(message=to_keeper)
def test_what_a_rank_says_arrives(pair: Pair, message: keeper.ToKeeper) -> None:
    keeper.send(pair[0], message)
    assert keeper.receive_from_rank(pair[1]) == message


@shared
@given(message=to_rank)
def test_what_a_keeper_says_arrives(pair: Pair, message: keeper.ToRank) -> None:
    keeper.send(pair[0], message)
    assert keeper.receive_from_keeper(pair[1]) == (message, [])


@shared
@given(message=st.one_of(to_flusher, to_agent))
def test_what_agent_and_flusher_say_arrives(
    pair: Pair, message: flusher.ToFlusher | flusher.ToAgent
) -> None:
    kind = flusher.ToFlusher if isinstance(message, flusher.ToFlusher) else flusher.ToAgent
    datagrams.send(pair[0], message)
    assert datagrams.receive(pair[1], kind, 1) == (message, [])


@pytest.mark.parametrize("count", [1, 4, keeper.MOST_FDS])
def test_slots_come_with_their_descriptors_in_order(pair: Pair, count: int) -> None:
    before = descriptors()
    sent = memories(count)
    keeper.send(pair[0], keeper.Slots(count=count), tuple(sent))
    found = keeper.receive_from_keeper(pair[1])
    assert found is not None
    assert found[0] == keeper.Slots(count=count)
    assert len(found[1]) == count
    assert all(map(same, sent, found[1]))
    assert not any(os.get_inheritable(fd) for fd in found[1]), "a rank's own children need none"
    close(sent + found[1])
    assert descriptors() == before


def test_a_flusher_gets_its_descriptor_and_no_second_one(pair: Pair) -> None:
    before = descriptors()
    sent = memories(2)
    message = flusher.Write(id=1, checkpoint="/p", job="j", round=1, step=2, file="f")
    datagrams.send(pair[0], message, tuple(sent))
    found = datagrams.receive(pair[1], flusher.ToFlusher, 1)
    assert found is not None
    assert found[0] == message
    assert [same(sent[0], fd) for fd in found[1]] == [True]
    assert not os.get_inheritable(found[1][0])
    close(sent + found[1])
    assert descriptors() == before


def test_a_rank_passes_no_descriptor_to_its_keeper(pair: Pair) -> None:
    before = descriptors()
    sent = memories(3)
    keeper.send(pair[0], keeper.Need(bytes=1), tuple(sent))
    assert keeper.receive_from_rank(pair[1]) == keeper.Need(bytes=1)
    close(sent)
    assert descriptors() == before


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_message_is_refused_and_leaves_nothing(
    pair: Pair, data: bytes, count: int
) -> None:
    sent = memories(count)
    before = descriptors()
    receivers: list[Callable[[socket.socket], object]] = [
        keeper.receive_from_rank,
        keeper.receive_from_keeper,
        partial(datagrams.receive, kind=flusher.ToFlusher, most_fds=1),
        partial(datagrams.receive, kind=flusher.ToAgent, most_fds=0),
    ]
    for receive in receivers:
        socket.send_fds(pair[0], [data], sent)
        with pytest.raises((LinkError, CodecError)):
            receive(pair[1])
    assert descriptors() == before
    close(sent)


def test_one_sides_messages_are_none_of_the_others(pair: Pair) -> None:
    for message in (keeper.Need(bytes=1), keeper.Whole(round=1, step=1)):
        keeper.send(pair[0], message)
    with pytest.raises(LinkError):
        keeper.receive_from_keeper(pair[1])
    with pytest.raises(LinkError):
        keeper.receive_from_rank(pair[1])
    datagrams.send(pair[0], flusher.Done(id=1))
    with pytest.raises(CodecError):
        datagrams.receive(pair[1], flusher.ToFlusher, 1)


@shared
@given(data=st.binary(min_size=1, max_size=300))
def test_any_bytes(pair: Pair, data: bytes) -> None:
    before = descriptors()
    for _ in range(2):
        socket.send_fds(pair[0], [data], [0])
    with pytest.raises(LinkError):
        keeper.receive_from_rank(pair[1])
    with pytest.raises(LinkError):
        keeper.receive_from_keeper(pair[1])
    assert descriptors() == before


def test_the_end_is_the_end(pair: Pair) -> None:
    sent = memories(1)
    before = descriptors()
    for _ in range(2):
        socket.send_fds(pair[0], [b""], sent)
    assert keeper.receive_from_keeper(pair[1]) is None
    assert datagrams.receive(pair[1], flusher.ToAgent, 0) is None
    assert descriptors() == before
    close(sent)
    pair[0].close()
    assert keeper.receive_from_rank(pair[1]) is None
    assert keeper.receive_from_keeper(pair[1]) is None
    assert datagrams.receive(pair[1], flusher.ToAgent, 0) is None


def test_who_dies_with_something_unread_has_said_what_it_said(pair: Pair) -> None:
    """The kernel tells of the one before the other: a reset, then the messages, then the end."""
    datagrams.send(pair[1], keeper.Need(bytes=1))
    datagrams.send(pair[0], keeper.Need(bytes=2))
    pair[0].close()
    assert keeper.receive_from_rank(pair[1]) == keeper.Need(bytes=2)
    assert keeper.receive_from_rank(pair[1]) is None


@pytest.mark.parametrize("theirs", ["", "x", "1", "1.", "-1.0", "9" * 5000 + ".0", "1.0.0"])
def test_who_names_no_version_is_refused(theirs: str) -> None:
    said = keeper.Open(
        version=theirs, checkpoint="/c", rank=0, world_size=1, local_rank=0, local_world_size=1
    )
    with pytest.raises(LinkError):
        keeper.check(said)


def test_neighbours_understand_each_other_and_others_do_not() -> None:
    ours = keeper.opening(
        checkpoint="/c", rank=0, world_size=1, local_rank=0, local_world_size=1, terms=Terms()
    )
    keeper.check(ours)
    other = keeper.Open(
        version="99.0", checkpoint="/c", rank=0, world_size=1, local_rank=0, local_world_size=1
    )
    with pytest.raises(ProtocolMismatch):
        keeper.check(other)

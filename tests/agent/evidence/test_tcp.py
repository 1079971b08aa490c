import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic.agent.evidence import tcp

HEADER = struct.Struct("=IHHII")
RECORDED = bytes.fromhex(
    "980100001400020000000000ad57000002010000edabc5107f0000010000000000000000000000007f000001"
    "0000000000000000000000000000000005100000000000000000000000000000000000000000000017f71600"
    "050008000000000008000f00000000000c001500010000000000000006001600520000001c01020001000000"
    "0007aa01e01c0300409c000000800000e80300000000000000000000000000000000000000000000c8000000"
    "00000000c8000000c8000000ffff00001d1201000d00000006000000ffffff7f0a000000cbff000003000000"
    "00000000cbff000000000000c49ca5c510000000ffffffffffffffff0000000000000000e803000000000000"
    "0100000003000000000000000d00000001000000000000000000000000000000000000000000000000000000"
    "0000000000000000000000000100000000000000000000000000000000000000000000000000000000000000"
    "0000000000000100001401000000000000000000000000000000000000000000000000000000000000000000"
    "000000000000000000000000980100001400020000000000ad57000002010000c510edab7f00000100000000"
    "00000000000000007f0000010000000000000000000000000000000006100000000000000000000000000000"
    "000000000000000016f71600050008000000000008000f00000000000c001500010000000000000006001600"
    "520000001c010200010000000007aa01e01c030000000000008a000018020000000000000000000000000000"
    "0000000000000000c800000000000000c8000000c8000000ffff0000d7ff00000a00000005000000ffffff7f"
    "0b000000cbff00000300000000000000d7ff0000000000005c0721ce13000000ffffffffffffffffe9030000"
    "00000000000000000000000003000000020000000000000006000000000000000100000000c0f35e01000000"
    "0000000000000000000000000000000000000000000000000200000000000000e80300000000000000000000"
    "0000000000000000000000000000000000140100000001000000000000000000000000000000000000000000"
    "000000000000000000000000000000000000000000000000"
)
"""Of Linux 6.18, for IPv4: a socket that has taken 1,000 bytes and sent none, and the other end of it."""
DONE = HEADER.pack(20, 3, 2, 0, 0) + bytes(4)
REFUSED = HEADER.pack(36, 2, 0, 0, 0) + struct.pack("=i", -2) + bytes(16)


def told() -> bool:
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4).close()
    except OSError:
        return False
    return True


tells = pytest.mark.skipif(not told(), reason="this kernel tells nothing of sockets")


def test_an_answer_of_the_kernels_is_read() -> None:
    assert tcp.parse(RECORDED) == ({1505047: 1000, 1505046: 1001}, False)
    assert tcp.parse(RECORDED + DONE) == ({1505047: 1000, 1505046: 1001}, True)


@pytest.mark.parametrize("answer", [DONE, REFUSED, bytes(HEADER.size), b"short"])
def test_an_answer_that_tells_nothing_is_the_last(answer: bytes) -> None:
    assert tcp.parse(answer) == ({}, True)


def test_what_is_cut_off_or_scrambled_is_read_to_its_end() -> None:
    whole, _ = tcp.parse(RECORDED)
    for size in range(len(RECORDED)):
        kept, rest = RECORDED[:size], RECORDED[size:]
        assert tcp.parse(kept)[0].items() <= whole.items()
        assert len(tcp.parse(rest)[0]) <= len(rest) // HEADER.size
        assert tcp.parse(kept + bytes(len(rest)))[0].keys() <= whole.keys()


def test_what_grows_by_more_than_heartbeats_has_moved() -> None:
    before = {1: 9 << 30, 2: 5000, 3: 0, 4: 70_000}
    now = {1: (9 << 30) + tcp.LITTLE, 2: 5000 + tcp.LITTLE - 1, 3: 0, 5: 1 << 20}
    assert tcp.grown(before, now) == {1: tcp.LITTLE, 5: 1 << 20}, "5 is new, 4 was closed"
    assert tcp.grown({}, now) == {}, "nothing was known before"
    assert tcp.grown(now, {}) == {}


@contextmanager
def pair(family: int, address: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(family, socket.SOCK_STREAM) as server:
        try:
            server.bind((address, 0))
        except OSError:
            pytest.skip("no such addresses here")
        server.listen()
        with socket.socket(family, socket.SOCK_STREAM) as near:
            near.connect(server.getsockname())
            far, _ = server.accept()
            with far:
                yield near, far


@tells
@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_what_sockets_send_and_receive_is_counted(family: int, address: str) -> None:
    with pair(family, address) as (near, far):
        inodes = [os.fstat(end.fileno()).st_ino for end in (near, far)]
        near.sendall(bytes(1000))
        assert len(far.recv(1000, socket.MSG_WAITALL)) == 1000
        far.sendall(b"!")  # and that it has these
        assert near.recv(1) == b"!"
        counts = tcp.read()
    assert counts[inodes[1]] >= 1000
    assert 1001 <= counts[inodes[0]] <= 1010
    assert not set(inodes) & set(tcp.read())

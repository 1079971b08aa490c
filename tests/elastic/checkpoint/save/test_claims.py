"""Locks and sockets of a rank that forks: its children have neither."""

import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from elastic.checkpoint.save import claims
from elastic.checkpoint.save.keeping import Keeping
from elastic.proto import slot


@contextmanager
def forked() -> Iterator[Callable[[], None]]:
    """A child that does nothing; ends with the block."""
    ends, begun = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        os.close(ends[1])
        os.write(begun[1], b"x")
        os.read(ends[0], 1)
        os._exit(0)
    os.read(begun[0], 1)
    try:
        yield lambda: None
    finally:
        os.close(ends[1])
        os.waitpid(child, 0)
        for fd in (ends[0], *begun):
            os.close(fd)


def test_a_child_does_not_keep_a_slot_locked() -> None:
    fd = slot.create(slot.PAGE)
    claimed = claims.claim(fd, exclusive=True)
    assert claimed is not None
    with forked():
        assert slot.claim(fd, exclusive=False) is None
        claims.release(claimed)
        again = slot.claim(fd, exclusive=False)
        assert again is not None
        os.close(again)
    os.close(fd)


def test_a_child_does_not_keep_the_keeper_waiting() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(150)
    keeping = Keeping(ours)
    with forked():
        keeping.close()
        assert theirs.recv(1) == b""
    theirs.close()


def test_a_claim_that_cannot_be_had_is_none() -> None:
    fd = slot.create(slot.PAGE)
    with claims.shared([fd]):
        assert claims.claim(fd, exclusive=True) is None
    claimed = claims.claim(fd, exclusive=True)
    assert claimed is not None
    claims.release(claimed)
    with pytest.raises(KeyError):
        claims.release(claimed)
    os.close(fd)

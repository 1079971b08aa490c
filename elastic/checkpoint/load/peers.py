"""Images in other nodes' memory, as their couriers serve them (`proto/courier.py`). Needs no torch."""

import http.client
import ssl
from collections import deque
from urllib.parse import urlsplit

from elastic.proto import slot, sums
from elastic.proto.courier import Tls
from elastic.proto.errors import SlotError

TIMEOUT = 30.0
"""Seconds that another node may be silent."""


class Gone(OSError):
    """What was asked for is not there any more."""


class Peer:
    """One slot of another node; a `Reader` of its image. Several threads may use it at a time."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        """address: `courier.address`. Raises OSError where the files of `tls` cannot be used."""
        parts = urlsplit(address)
        self._host, self._port, self._path = parts.hostname or "", parts.port or 0, parts.path
        self._context = None if tls is None else _context(tls)
        self._idle: deque[http.client.HTTPConnection] = deque()

    def read(self, start: int, end: int) -> memoryview:
        """Bytes of the image. Raises OSError."""
        data = memoryview(bytearray(end - start))
        self.fill(slot.PAGE + start, data)
        return data

    def fill(self, start: int, out: memoryview) -> None:
        """Fill `out` with the slot's bytes from `start` on. Raises OSError; `Gone` where they are not
        there."""
        if not len(out):
            return
        used = True
        try:
            connection = self._idle.pop()
        except IndexError:
            connection, used = self._connect(), False
        try:
            self._get(connection, start, out)
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            if used and not isinstance(error, Gone):  # it may have been closed while it was idle
                self.fill(start, out)
                return
            if isinstance(error, OSError):
                raise
            raise OSError(f"{self._host}:{self._port} gives no answer: {error!r}") from error
        self._idle.append(connection)

    def _connect(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=TIMEOUT, context=self._context
        )

    def _get(self, connection: http.client.HTTPConnection, start: int, out: memoryview) -> None:
        wanted = f"bytes={start}-{start + len(out) - 1}"
        connection.request("GET", self._path, headers={"Range": wanted})
        answer = connection.getresponse()
        if answer.status == http.client.NOT_FOUND:
            raise OSError(f"{self._host}:{self._port} is not the courier that was meant")
        if answer.status != http.client.PARTIAL_CONTENT or answer.length != len(out):
            answer.read(1 << 16)
            raise Gone(f"{self._host}:{self._port} has it no more: {answer.status} {answer.reason}")
        at = 0
        while at < len(out):
            count = answer.readinto(out[at:])
            if not count:
                raise OSError(f"{self._host}:{self._port} ended in the midst of an image")
            at += count

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def head(peer: Peer) -> tuple[memoryview, slot.Head, tuple[sums.Chunk, ...]]:
    """The first page of its slot, what it says, and the checksums of its image.

    Raises OSError, `SlotError` where it is damaged, `ProtocolMismatch`.
    """
    page = memoryview(bytearray(slot.PAGE))
    peer.fill(0, page)
    found = slot.parse(page)
    if found.image_bytes > 1 << 50:
        raise SlotError("the slot's header is damaged: its sizes make no sense")
    return page, found, slot.chunks(page, peer.read(found.table_at, found.image_bytes))


def _context(tls: Tls) -> ssl.SSLContext:
    """Both sides show a certificate of the job's own authority; its name says nothing, as nodes come
    and go."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context

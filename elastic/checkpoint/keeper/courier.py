"""`python -m elastic.checkpoint.keeper.courier FD`: images to other nodes, and from them.

Behind training's back, one a node. What it fetches is verified chunk by chunk, and is no snapshot before all of it is there.
Needs no torch.
"""

import hmac
import http.server
import mmap
import os
import socket
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any, cast
from urllib.parse import unquote

from setproctitle import setproctitle

from elastic.agent.prctl import set_pdeathsig
from elastic.checkpoint.load.peers import Gone, Peer, head
from elastic.proto import courier, datagrams, slot, sums
from elastic.proto.courier import Drop, Failed, Fetch, Fetched, Forget, Hold, Serve, Tls, ToCourier
from elastic.proto.errors import ElasticError, ProtocolMismatch, SlotError
from elastic.proto.moment import Moment

NICE = 10
THREADS = 4
"""Images that are fetched at a time."""
TIMEOUT = 60.0
"""Seconds that who reads from us may be silent."""
_UNWANTED = "it is not wanted any more"


def main(args: list[str]) -> None:
    """Serve the agent at the other end of the descriptor `args[0]`, and end with it."""
    end = socket.socket(fileno=int(args[0]))
    set_pdeathsig()
    setproctitle("elastic-courier")
    os.nice(NICE)
    shelf = Shelf()
    fetches = _Fetches(end)
    while (received := datagrams.receive(end, ToCourier, 1)) is not None:
        message, fds = received
        match message:
            case Serve():
                fetches.tls = message.tls
                _serve(socket.socket(fileno=fds.pop()), message, shelf)
            case Hold():
                shelf.put(message.name, message.checkpoint, fds.pop())
            case Drop():
                shelf.drop(message.name)
            case Fetch():
                fetches.begin(message, fds.pop())
            case Forget():
                fetches.forget(message.id)


# --- to other nodes ------------------------------------------------------------------------------


class Shelf:
    """The slots that are served, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[str, tuple[str, int]] = {}

    def put(self, name: str, checkpoint: str, fd: int) -> None:
        """fd: ours from here on."""
        with self._lock:
            self._slots[name] = checkpoint, fd

    def drop(self, name: str) -> None:
        with self._lock:
            if name in self._slots:
                os.close(self._slots.pop(name)[1])

    def claim(self, checkpoint: str, moment: Moment, rank: int) -> int | None:
        """A descriptor of the slot with that image, which nobody writes to until it is closed."""
        with self._lock:
            for name, fd in self._slots.values():
                if name == checkpoint and _holds(fd, moment, rank):
                    claim = slot.claim(fd, exclusive=False)
                    if claim is not None and _holds(claim, moment, rank):
                        return claim
                    if claim is not None:
                        os.close(claim)
        return None


def _holds(fd: int, moment: Moment, rank: int) -> bool:
    with suppress(SlotError, ProtocolMismatch):
        stamp = slot.parse(memoryview(os.pread(fd, slot.PAGE, 0))).stamp
        return (stamp.round, stamp.step, stamp.rank) == (*moment, rank)
    return False


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket, serve: Serve, shelf: Shelf) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.secret = serve.secret
        self.shelf = shelf
        self.context = None if serve.tls is None else _server_context(serve.tls)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread: a slow handshake keeps nobody else waiting."""
        request.settimeout(TIMEOUT)
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who reads may go away at any time."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        try:
            _, secret, checkpoint, *numbers = self.path.split("/")
            if not hmac.compare_digest(secret.encode(), server.secret.encode()):
                raise ValueError
            round_, step, rank = map(int, numbers)
            unit, _, span = self.headers.get("Range", "").partition("=")
            start, last = map(int, span.split("-"))
            if unit != "bytes" or not 0 <= start <= last:
                raise ValueError
        except ValueError:
            self.send_error(http.HTTPStatus.NOT_FOUND)
            return
        claim = server.shelf.claim(unquote(checkpoint), Moment(round_, step), rank)
        if claim is None:
            self.send_error(http.HTTPStatus.GONE, "no slot holds it")
            return
        with os.fdopen(claim, "rb") as file:
            size = os.fstat(claim).st_size
            if last >= size:
                self.send_error(http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                return
            self.send_response(http.HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Range", f"bytes {start}-{last}/{size}")
            self.send_header("Content-Length", str(last + 1 - start))
            self.end_headers()
            self.connection.sendfile(file, start, last + 1 - start)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def _serve(listener: socket.socket, message: Serve, shelf: Shelf) -> None:
    server = _Server(listener, message, shelf)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def _server_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    return context


# --- from other nodes ----------------------------------------------------------------------------


class _Fetches:
    """What is being fetched; the agent hears of each how it ended."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._pool = ThreadPoolExecutor(THREADS)
        self._pace = Pace()
        self._forgotten: dict[int, threading.Event] = {}
        self.tls: Tls | None = None

    def begin(self, message: Fetch, fd: int) -> None:
        forgotten = self._forgotten[message.id] = threading.Event()
        self._pool.submit(self._run, message, fd, forgotten)

    def forget(self, number: int) -> None:
        if (forgotten := self._forgotten.get(number)) is not None:
            forgotten.set()

    def _run(self, message: Fetch, fd: int, forgotten: threading.Event) -> None:
        try:
            if forgotten.is_set():
                raise SlotError(_UNWANTED)
            self._pace.limit = message.bandwidth
            address = courier.address(
                message.base,
                message.checkpoint,
                Moment(message.round, message.step),
                message.rank,
            )
            fetch(Peer(address, self.tls), fd, self._pace, forgotten)
            answer: Fetched | Failed = Fetched(id=message.id)
        except (OSError, ElasticError, MemoryError) as error:
            gone = isinstance(error, SlotError | Gone)
            answer = Failed(id=message.id, error=" ".join(str(error).split())[:500], gone=gone)
        finally:
            os.close(fd)
            del self._forgotten[message.id]
        with suppress(OSError):
            datagrams.send(self._end, answer)


class Pace:
    """So many bytes a second, of all threads together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.limit: int | None = None

    def delay(self, size: int, now: float) -> float:
        """Seconds from `now` until `size` bytes more may be read, by who asked for them."""
        if self.limit is None:
            return 0.0
        with self._lock:
            start = max(now, self._free_at)
            self._free_at = start + size / self.limit
            return start - now


def fetch(peer: Peer, fd: int, pace: Pace, forgotten: threading.Event) -> None:
    """Copy the image behind `peer` into the slot `fd`, each chunk verified.

    Raises OSError, `SlotError` where it is damaged, does not fit or is not wanted any more.
    """
    claim = slot.claim(fd, exclusive=True)
    if claim is None:
        raise OSError("the slot for a replica is being read")
    try:
        page, _, chunks = head(peer)
        size = os.fstat(fd).st_size
        os.posix_fallocate(fd, 0, size)  # an error now, where a page's absence is a SIGBUS later
        copying = slot.Copying(memoryview(mmap.mmap(fd, size)), page)
        _fill(peer, copying, chunks, pace, forgotten)
        copying.commit()
    finally:
        peer.close()
        os.close(claim)


def _fill(
    peer: Peer,
    copying: slot.Copying,
    chunks: tuple[sums.Chunk, ...],
    pace: Pace,
    forgotten: threading.Event,
) -> None:
    size, at = len(copying.image), 0
    for end, checksum in chunks:
        if forgotten.wait(pace.delay(end - at, monotonic())):
            raise SlotError(_UNWANTED)
        with copying.image[at:end] as part:
            peer.fill(slot.PAGE + at, part)
            if sums.checksum(part) != checksum:
                raise SlotError(f"bytes {at} to {end} of the image are damaged")
        at = end
    with copying.image[at:size] as table:
        peer.fill(slot.PAGE + at, table)
        if table != sums.pack(chunks):
            raise SlotError("the table of its checksums changed while it was read")


if __name__ == "__main__":
    main(sys.argv[1:])

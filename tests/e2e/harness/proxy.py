"""A TCP proxy that can be cut: what it carries stops, without an end of the stream."""

import contextlib
import selectors
import socket
import sys
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Listens at `at`, a free port of 127.0.0.1, and carries to `host:port`."""

    def __init__(self, host: str, port: int, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._silent = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._closed = False

    def __enter__(self) -> Self:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None
    ) -> None:
        self._closed = True
        self._waker.send(b"x")
        self._thread.join()
        for end in (*self._peers, self._listener, self._wake, self._waker):
            end.close()
        self._selector.close()

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._silent.set()
        self._waker.send(b"x")

    def mend(self) -> None:
        """Carry again what waited, and new connections."""
        self._silent.clear()
        self._waker.send(b"x")

    def _carry(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._wake:
                    source.recv(64)
                    self._mute(self._silent.is_set())
                elif source is self._listener:
                    self._accept()
                else:
                    self._move(source)

    def _mute(self, silent: bool) -> None:
        watched = set(self._selector.get_map())
        for end in (self._listener, *self._peers):
            if silent and end.fileno() in watched:
                self._selector.unregister(end)
            elif not silent and end.fileno() not in watched:
                self._selector.register(end, selectors.EVENT_READ)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(self._target, timeout=5)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            self._peers[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _move(self, source: socket.socket) -> None:
        if source not in self._peers:
            return  # its other end was closed in the same look
        peer = self._peers[source]
        with contextlib.suppress(OSError):
            if data := source.recv(1 << 16):
                peer.sendall(data)
                return
        for end in (source, peer):
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
            self._peers.pop(end, None)
            end.close()


if __name__ == "__main__":  # on a host of a network: until stdin ends
    with Proxy(sys.argv[1], int(sys.argv[2]), (sys.argv[3], int(sys.argv[4]))):
        sys.stdin.read()

"""Where snapshot slots are kept while agents come and go: descriptors that the guardian holds.

Each life of the agent is a fork of the guardian, and so has all that is kept; what it makes itself it
passes on. Imports neither grpc nor asyncio, as the guardian must not.
"""

import contextlib
import errno
import json
import os
import socket

from elastic.proto import descriptors

TIMEOUT = 5.0
"""Seconds that the guardian has to make room for one more message; it does nothing but wait."""
DATAGRAM = 1 << 16


class Kept:
    """Descriptors by name, ours as long as this process lives."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def keep(self, name: str, fd: int) -> None:
        """`fd` is ours from here on, in the place of what had that name. Raises OSError."""
        if name in self.kept:
            os.close(self.kept[name])
        self.kept[name] = fd

    def drop(self, name: str) -> None:
        """Nobody needs it any more."""
        os.close(self.kept.pop(name))


class Vault(Kept):
    """One object with two ends: made by the guardian, used by the agent that it forks, which what is
    kept outlives."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped: list[str] = []
        """Names that the guardian has not been told of."""
        self._guardian, self._agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guardian.setblocking(False)
        self._agent.setblocking(False)

    def forget(self) -> None:
        """In a fork that has no use for what is kept: it would hold the memory of what is dropped."""
        while self.kept:
            os.close(self.kept.popitem()[1])

    # --- in the agent ---

    def keep(self, name: str, fd: int) -> None:
        message = json.dumps({"keep": name}).encode()
        try:
            if len(message) > DATAGRAM:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            self._agent.settimeout(TIMEOUT)
            socket.send_fds(self._agent, [message], [fd])
        except OSError:
            os.close(fd)
            raise
        finally:
            self._agent.setblocking(False)
        super().keep(name, fd)

    def drop(self, name: str) -> None:
        """The same. Where the guardian does not listen now, it is told later."""
        super().drop(name)
        self._dropped.append(name)
        with contextlib.suppress(OSError):
            while self._dropped:
                self._agent.send(json.dumps({"drop": self._dropped[0]}).encode())
                del self._dropped[0]

    # --- in the guardian ---

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self._guardian.fileno()

    def take(self) -> None:
        """Do what the agent has asked for by now."""
        while True:
            try:
                data, fds = descriptors.receive(self._guardian, DATAGRAM, 1)
            except BlockingIOError:
                return
            message = json.loads(data)
            if "drop" in message:
                if message["drop"] in self.kept:  # else there was no descriptor left to keep it by
                    os.close(self.kept.pop(message["drop"]))
            elif fds:
                super().keep(message["keep"], fds[0])

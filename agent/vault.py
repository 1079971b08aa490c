"""Where snapshot slots are kept while agents come and go: descriptors that the guardian holds.

Each life of the agent is a fork of the guardian, and so has all that is kept; what it makes itself it
passes on. Imports neither grpc nor asyncio, as the guardian must not.
"""

import json
import os
import socket

TIMEOUT = 5.0
"""Seconds that the guardian has to make room for one more message; it does nothing but wait."""


class Vault:
    """One object with two ends: made by the guardian, used by the agent that it forks."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        """Descriptors by name."""
        self._guardian, self._agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guardian.setblocking(False)
        self._agent.settimeout(TIMEOUT)

    # --- in the agent ---

    def keep(self, name: str, fd: int) -> None:
        """Have `fd`, which is ours from here on, outlive this agent. Raises OSError."""
        socket.send_fds(self._agent, [json.dumps({"keep": name}).encode()], [fd])
        self.kept[name] = fd

    def drop(self, name: str) -> None:
        """Nobody needs it any more. Raises OSError."""
        self._agent.send(json.dumps({"drop": name}).encode())
        os.close(self.kept.pop(name))

    # --- in the guardian ---

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self._guardian.fileno()

    def take(self) -> None:
        """Do what the agent has asked for by now."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._guardian, 4096, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            message = json.loads(data)
            if "drop" in message:
                os.close(self.kept.pop(message["drop"]))
            elif fds:
                self.kept[message["keep"]] = fds[0]

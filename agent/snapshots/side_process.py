"""A process beside the agent that it asks for things by datagrams, and starts again when it dies: the
flusher, the courier."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from elastic.agent import boot
from elastic.agent.environment import mark
from elastic.agent.settings import AgentSettings
from elastic.proto import datagrams, descriptors, env
from elastic.proto.errors import CodecError

log = logging.getLogger(__name__)

YOUNG = 5.0
"""Seconds; who dies younger is not started again at once."""


class SideProcess:
    """Started when it is first asked. `heard` takes its answers, `lost` is called when it died, with
    whether it died young; whoever is asked next is another."""

    def __init__(
        self,
        settings: AgentSettings,
        module: str,
        answers: object,
        heard: Callable[[Any], None],
        lost: Callable[[bool], None],
    ) -> None:
        """module: ends with the socket whose descriptor is its first argument; answers: a union."""
        self._settings = settings
        self._module = module
        self._answers = answers
        self._heard = heard
        self._lost = lost
        self._process: subprocess.Popen[bytes] | None = None
        self._unreaped: dict[int, subprocess.Popen[bytes]] = {}
        """By pid, this one and those before it that have not ended yet."""
        self._end: socket.socket | None = None
        self._unsent: deque[tuple[object, list[int]]] = deque()
        """What its socket has no room for yet, with descriptors that are ours."""
        self._began = 0.0
        self.over = False
        """`kill` was called."""

    @property
    def pids(self) -> set[int]:
        return set(self._unreaped)

    @property
    def running(self) -> bool:
        return self._end is not None

    def ask(self, message: object, fds: Sequence[int] = ()) -> None:
        """fds stay the caller's. Raises OSError; nothing happens once `kill` was called."""
        if self.over:
            return
        end = self._connection()
        if not self._unsent:
            try:
                datagrams.send(end, message, fds)
                return
            except BlockingIOError:  # it is only starting, and this node has much to tell it
                asyncio.get_running_loop().add_writer(end, self._writable, end)
        self._unsent.append((message, [os.dup(fd) for fd in fds]))

    def _writable(self, end: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    datagrams.send(end, *self._unsent[0])
                except BlockingIOError:
                    raise
                except OSError:
                    break  # it is dead; `_readable` sees that
                descriptors.close(self._unsent.popleft()[1])
            asyncio.get_running_loop().remove_writer(end)

    def _connection(self) -> socket.socket:
        if self._end is None:
            end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.ExitStack() as undo, theirs:
                undo.callback(end.close)
                workload = self._settings.workload
                process = subprocess.Popen(
                    boot.command(workload.python, self._module, str(theirs.fileno())),
                    cwd="/",
                    env={**workload.environ, env.MARK: mark(self._settings, 0)},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
                self._reap_in_time(process)
                undo.pop_all()
            self._process = process
            loop = asyncio.get_running_loop()
            self._end, self._began = end, loop.time()
            end.setblocking(False)
            loop.add_reader(end, self._readable, end)
        return self._end

    def _reap_in_time(self, process: "subprocess.Popen[bytes]") -> None:
        """Once it has ended, which a disk that hangs may hold up for long. Raises OSError, and ends it."""
        loop = asyncio.get_running_loop()
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise

        def reap() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            process.wait()
            del self._unreaped[process.pid]

        self._unreaped[process.pid] = process
        loop.add_reader(pidfd, reap)

    def _readable(self, end: socket.socket) -> None:
        try:
            received = datagrams.receive(end, self._answers, 0)
        except BlockingIOError:
            return
        except (OSError, CodecError):
            received = None
        if received is None:
            self._gone(end)
        else:
            self._heard(received[0])

    def _gone(self, end: socket.socket) -> None:
        self._part(end)
        if self.over:
            return
        if self._process is not None:
            self._process.kill()
        self._process = None
        log.warning("the %s died and is started again", self._module.rpartition(".")[2])
        self._lost(asyncio.get_running_loop().time() - self._began < YOUNG)

    def _part(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(end)
        loop.remove_writer(end)
        end.close()
        self._end = None
        while self._unsent:
            descriptors.close(self._unsent.popleft()[1])

    def rest(self) -> None:
        """It has answered all that it was asked, and ends."""
        if self._end is not None:
            self._part(self._end)
            self._process = None

    def kill(self) -> None:
        """End it, at the end of this agent."""
        self.over = True
        if self._process is not None:
            self._process.kill()

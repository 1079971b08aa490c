"""The program end of the starter protocol: requests in, processes out, by a double fork.

The starter forks A, A forks B, the process that is wanted. A tells the agent B's pid, together with
a pidfd of itself, and ends; so B's parent becomes the agent, the nearest subreaper above. B waits
for that, on A's pidfd: it turns readable only after B has its new parent, which the end of a file
or of a pipe would not promise. Starters have one thread, the main one.
"""

import array
import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elastic.agent.prctl import set_pdeathsig
from elastic.agent.starters.spec import StartSpec
from elastic.proto import descriptors, env
from elastic.proto.limits import limit_open_files

DATAGRAM = 1 << 16
"""Bytes of the longest datagram; what may be longer travels in a memfd."""

FIRST_FD = 200
"""Descriptors that ranks inherit lie above those that shell scripts choose by number."""

_FDS = 16

_DEAF_HERE = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTOU}
"""Signals that we ignore whether the launcher was told to or not: Python two, the agent the third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One `start`, read and checked."""

    id: int
    spec: StartSpec
    fds: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A starter's socket to its agent, and who the agent is."""

    socket: socket.socket
    agent: int
    """Pid."""
    intermediates: list[int] = field(default_factory=list)
    """Processes between us and what we started, to be reaped: the next start does not wait for it."""

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        data = json.dumps(message).encode()
        try:
            self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)  # no agent any more


def open_channel(fd: int) -> Channel:
    """The starter's end of the pair; dies with the agent from here on."""
    agent = os.getppid()
    set_pdeathsig()
    if os.getppid() != agent or agent == 1:
        os._exit(0)
    return Channel(socket=socket.socket(fileno=fd), agent=agent)


def receive(channel: Channel) -> tuple[dict[str, Any], list[int]] | None:
    """One message with its descriptors; None when the agent has closed its end."""
    data, fds = descriptors.receive(channel.socket, DATAGRAM, _FDS)
    return (json.loads(data), fds) if data else None


def start(
    channel: Channel,
    message: dict[str, Any],
    fds: list[int],
    *,
    unfit: Callable[[StartSpec], str | None] = lambda spec: None,
) -> Request | None:
    """Start what a message asks for. Returns None in the starter, the request in the new process.

    `unfit` names a reason why this starter can never start a spec, or None.
    """
    number = int(message["start"])
    try:
        spec = StartSpec.from_json(read_memory(fds[0]))
        request = Request(id=number, spec=spec, fds=dict(zip(message["fds"], fds[1:], strict=True)))
        reason = unfit(spec)
        if reason is None:
            first = os.fork()
        else:
            channel.send({"unfit": number, "error": reason})
            first = -1
    except (ValueError, IndexError, OSError) as error:
        channel.send({"failed": number, "error": str(error)})
        first = -1
    if first == 0:
        try:
            return _intermediate(channel, request, fds)
        except BaseException:  # noqa: BLE001 - whatever it is, there must be no second starter
            os._exit(1)
    for fd in fds:
        os.close(fd)
    if first > 0:
        channel.intermediates.append(first)
    _reap(channel.intermediates)
    return None


def _reap(pids: list[int]) -> None:
    pids[:] = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _intermediate(channel: Channel, request: Request, fds: list[int]) -> Request:
    """In A: fork B, tell the agent, end. Returns only in B, once it is the agent's child."""
    try:
        itself = os.pidfd_open(os.getpid())
        pid = os.fork()
    except OSError as error:
        channel.send({"failed": request.id, "error": str(error)})
        os._exit(1)
    if pid:
        channel.send({"started": request.id, "pid": pid}, (itself,))
        os._exit(0)
    channel.socket.close()  # so that the agent sees the starter's end even while this one is starting
    descriptors.ready([itself], None)
    os.close(itself)
    os.close(fds[0])
    _adopted(channel.agent)
    return request


def _adopted(agent: int) -> None:
    """Live no longer than the agent, whose child we are by now."""
    set_pdeathsig()
    if os.getppid() != agent:
        os._exit(0)
    os.setsid()


def prepare(request: Request) -> dict[str, str]:
    """In B: everything about the process that is not its program; returns its environment.

    Where that fails, one line on the rank's stderr, and exit status 126.
    """
    fds = dict(request.fds)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if name in fds:
            fd = fds.pop(name)
            os.dup2(fd, number)
            if fd not in (1, 2):
                os.close(fd)
    environ = dict(request.spec.environ)
    for name, variable in (("page", env.PAGE_FD), ("link", env.LINK_FD)):
        environ.pop(variable, None)
        if name in fds and request.spec.kind != "store":
            environ[variable] = str(_inherit(fds.pop(name)))
    try:
        _place(request.spec)
    except (OSError, ValueError) as error:
        give_up(f"cannot start: {error}", 126)
    _reset_signals()
    return environ


def _place(spec: StartSpec) -> None:
    if spec.cpus is not None:
        # A spare may have other threads, torch's for backward say, and one of them may end now.
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), spec.cpus)
    if spec.open_files is not None:
        limit_open_files(spec.open_files)
    os.chdir(spec.cwd)


def _inherit(fd: int) -> int:
    """The same file under a number of its own that an exec keeps."""
    number = fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FD)
    os.close(fd)
    return number


def _reset_signals() -> None:
    """As if the launcher had executed the program: it is deaf to what the launcher was told to be
    deaf to, as by `nohup` or `trap '' USR1`, and to nothing else."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if number in _DEAF_HERE or signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    if faulthandler.is_enabled():  # by PYTHONFAULTHANDLER; its handlers went too
        faulthandler.disable()
        faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def give_up(text: str, status: int) -> NoReturn:
    """One line on stderr, and the end of this process."""
    with contextlib.suppress(OSError):
        os.write(2, f"elastic: {text}\n".encode(errors="surrogateescape"))
    os._exit(status)


def read_memory(fd: int) -> bytes:
    """All of a memfd, wherever its writer left the position."""
    size = os.fstat(fd).st_size
    parts = bytearray()
    while len(parts) < size:
        part = os.pread(fd, size - len(parts), len(parts))
        if not part:
            break
        parts += part
    return bytes(parts)

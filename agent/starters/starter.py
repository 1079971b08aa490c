"""The agent's end of a starter: one protocol for spawner, standby and nursery.

Over a SOCK_SEQPACKET pair, one small JSON object a datagram:

| agent to starter                | descriptors              | answer                                  |
|---------------------------------|--------------------------|-----------------------------------------|
| {"start": id, "fds": [names]}   | spec, then one a name    | {"started": id, "pid"} + pidfd of the   |
|                                 |                          | intermediate, or {"failed": id, "error"}|
|                                 |                          | for now, {"unfit": id, "error"} for ever|
| {"preload": true}               | list of modules          | {"preloaded", "refused", "seconds"}     |

The first message of a starter is {"ready": true, "seconds", "threads"}. Spec and list travel as memfds,
since a spec holds a whole environment. The end of file is the starter's death, and only comes once no
start is under way any more.
"""

import array
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.agent import boot
from elastic.agent.starters.spec import StartSpec
from elastic.proto import descriptors, env
from elastic.proto.errors import ElasticError, StarterDied

_DATAGRAM = 1 << 16

_PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    # -I -S: the spawner needs the standard library only, and starts the sooner.
    "spawner": ("elastic.agent.starters.spawner", ("-I", "-S")),
    "standby": ("elastic.agent.starters.standby", ("-u",)),
    "nursery": ("elastic.agent.starters.nursery", ()),
}

FORKED_ENVIRONMENT = {
    # A fork loses every thread of an OpenMP pool, so there must be none.
    "OMP_NUM_THREADS": "1",
    # CUDA that was initialised before a fork is lost in the child; NVML is not.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class StartFailed(ElasticError):
    """The starter lives, and could not start what it was asked to."""


class Unfit(StartFailed):
    """It could not be asked for that, ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a starter said when it was ready."""

    seconds: float
    """That its preparation took, imports mostly."""
    threads: int
    """Of its process; a standby with more than one must not be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    """What became of the modules that a standby was asked to import."""

    loaded: tuple[str, ...]
    refused: dict[str, str]
    """Module and the reason, in words."""
    seconds: float


class Starter:
    """A process that starts others. Use it from one event loop, and launch it in the main thread:
    the program asks to be killed when the thread that started it ends.

    The agent must be a child subreaper (`prctl.set_child_subreaper`) before the first `start`.
    """

    def __init__(self, kind: str, process: "subprocess.Popen[bytes]", end: socket.socket) -> None:
        self.kind = kind
        self.pid = process.pid
        self.died = asyncio.Event()
        """Set once the program is gone; every start under way has failed with `StarterDied` then."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._socket = end
        self._loop = asyncio.get_running_loop()
        self._ids = 0
        self._starts: dict[int, asyncio.Future[int]] = {}
        self._preload: asyncio.Future[Preloaded] | None = None
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._adopting: set[int] = set()
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()
        self._loop.add_reader(end, self._readable)

    @classmethod
    async def launch(
        cls,
        kind: str,
        *,
        environ: Mapping[str, str],
        cwd: str,
        python: str = sys.executable,
        stderr: int | None = None,
    ) -> "Starter":
        """Start a program, one of `_PROGRAMS`, that runs until `kill`, or until we end.

        For a standby, `environ` is the script's at its first import of torch; a rank's page and link
        are taken out of it. `stderr` is a descriptor for what the program itself says (default:
        ours). Raises OSError.
        """
        module, flags = _PROGRAMS[kind]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        variables = {k: v for k, v in environ.items() if k not in (env.PAGE_FD, env.LINK_FD)}
        if kind != "spawner":
            variables |= FORKED_ENVIRONMENT
        with theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 - a vfork, and rare
                boot.command(python, module, str(theirs.fileno()), flags=flags),
                env=variables,
                cwd=cwd,
                stderr=stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a ^C at the terminal is the agent's to handle
            )
        return cls(kind, process, ours)

    async def ready(self) -> Ready:
        """Wait until the program serves. Starts may be asked for before; they wait."""
        return await asyncio.shield(self._ready)

    @property
    def busy(self) -> bool:
        """Whether it may be importing modules, and a start may have to wait for seconds."""
        return not self._ready.done() or self._preload is not None

    async def start(self, spec: StartSpec, fds: Mapping[str, int]) -> int:
        """Start a process and return its pid; it is our child then, waiting to be reaped by us.

        `fds` are descriptors by name: stdout, stderr, page, link; listen (and link) for a store.
        They stay open here. Raises `StartFailed` or `StarterDied`.
        """
        if self.died.is_set():
            raise StarterDied(f"the {self.kind} is dead")
        self._ids += 1
        number = self._ids
        answer: asyncio.Future[int] = self._loop.create_future()
        self._starts[number] = answer
        memory = descriptors.memory_file(spec.to_json())
        try:
            await self._send({"start": number, "fds": list(fds)}, (memory, *fds.values()))
            return await answer
        finally:
            os.close(memory)
            self._starts.pop(number, None)

    async def preload(self, modules: Sequence[str]) -> Preloaded:
        """Have a standby import what it safely can; one call at a time. Raises `StarterDied`.

        It serves starts in between, though not while it imports.
        """
        answer: asyncio.Future[Preloaded] = self._loop.create_future()
        self._preload = answer
        memory = descriptors.memory_file(json.dumps(list(modules)).encode())
        try:
            await self._send({"preload": True}, (memory,))
            return await answer
        finally:
            os.close(memory)
            self._preload = None

    def kill(self) -> None:
        """End the program; what it started lives on."""
        if not self.died.is_set():
            with contextlib.suppress(OSError):  # it ended meanwhile
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self, patience: float) -> None:
        """End the program; where SIGKILL does not in `patience` seconds, take it for dead."""
        self.kill()
        try:
            async with asyncio.timeout(patience):
                await self.died.wait()
        except TimeoutError:
            self._fail(StarterDied(f"the {self.kind} does not end on SIGKILL"))

    async def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        data = json.dumps(message).encode()
        async with self._turn:
            while not self.died.is_set():
                try:
                    self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                    return
                except BlockingIOError:
                    await self._writable()
                except (BrokenPipeError, ConnectionResetError):
                    break  # the end of file follows, and fails what waits
        await self.died.wait()
        raise StarterDied(f"the {self.kind} died")

    async def _writable(self) -> None:
        """Wait for room in the socket, or for its end."""
        room = self._room = asyncio.Event()
        self._loop.add_writer(self._socket, room.set)
        await room.wait()
        if self._socket.fileno() >= 0:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data, fds = descriptors.receive(self._socket, _DATAGRAM, 1)
        except BlockingIOError:
            return
        if not data:
            self._end()
            return
        self._take(json.loads(data), fds)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"started": int(number), "pid": int(pid)} if fds:
                self._adopt(number, pid, fds[0])
            case {"started": int(number)}:  # the kernel drops what finds no room in our table
                self._refuse(number, StartFailed("too many open files on this node: ulimit -n"))
            case {"failed": int(number), "error": str(error)}:
                self._refuse(number, StartFailed(f"the {self.kind} cannot start it: {error}"))
            case {"unfit": int(number), "error": str(error)}:
                self._refuse(number, Unfit(f"the {self.kind} cannot start it: {error}"))
            case {"ready": True}:
                if not self._ready.done():
                    self._ready.set_result(
                        Ready(seconds=message["seconds"], threads=message["threads"])
                    )
            case {"preloaded": list(loaded), "refused": dict(refused), "seconds": seconds}:
                if self._preload is not None and not self._preload.done():
                    self._preload.set_result(
                        Preloaded(loaded=tuple(loaded), refused=refused, seconds=seconds)
                    )

    def _refuse(self, number: int, error: StartFailed) -> None:
        answer = self._starts.get(number)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def _adopt(self, number: int, pid: int, intermediate: int) -> None:
        """Answer once the intermediate process has ended: from then on `pid` is our child."""
        self._adopting.add(number)

        def ended() -> None:
            self._loop.remove_reader(intermediate)
            os.close(intermediate)
            self._adopting.discard(number)
            answer = self._starts.get(number)
            if answer is not None and not answer.done():
                answer.set_result(pid)
            else:  # whoever asked was cancelled; the agent reaps it with the other orphans
                with contextlib.suppress(ProcessLookupError):  # it has done so already
                    os.kill(pid, signal.SIGKILL)

        self._loop.add_reader(intermediate, ended)

    def _end(self) -> None:
        """The end of file: nothing of the starter can answer any more."""
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self.kill()

        def reap() -> None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            status = self._process.wait()
            self._fail(StarterDied(f"the {self.kind} died ({_words(status)})"))

        self._loop.add_reader(self._pidfd, reap)

    def _fail(self, error: StarterDied) -> None:
        self.died.set()
        self._room.set()
        # A process that is being adopted has been started, and its answer is on the way.
        waiting: list[asyncio.Future[Any]] = [
            answer for number, answer in self._starts.items() if number not in self._adopting
        ]
        waiting.append(self._ready)
        if self._preload is not None:
            waiting.append(self._preload)
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting, which is no mistake


def _words(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"

"""What a standby may import: each module is tried in a process that is thrown away.

A module stays out when its import leaves a thread or a process behind (a fork would lose it), opens
a device or initialises CUDA (lost in a fork, too), or reads a variable that differs between ranks
(the standby has none of them). A trial that crashes or hangs is a refusal, and nothing else. What only
a fork would lose, a spare may import: it is the last fork before the rank.
"""

import importlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elastic.agent.prctl import set_pdeathsig
from elastic.proto import descriptors, env

TRIAL_TIMEOUT = 30.0
"""Seconds that an import may take."""

_HARMLESS_DEVICES = (
    "/dev/null",
    "/dev/zero",
    "/dev/urandom",
    "/dev/random",
    "/dev/tty",
    "/dev/pts/",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a module stays out of the standby."""

    reason: str
    for_forks: bool = False
    """Only since a fork would lose what the import leaves."""


@dataclass(slots=True, kw_only=True)
class Trial:
    """An import that runs in a child of ours."""

    module: str
    pid: int
    pidfd: int
    verdict: int
    """Read end of the pipe on which it writes the reason against it; nothing written: it crashed."""
    deadline: float = field(default_factory=lambda: time.monotonic() + TRIAL_TIMEOUT)

    def finish(self) -> Refusal | None:
        """Reap it, killed where it still runs. Why the module stays out, or None."""
        timed_out = not descriptors.ready([self.pidfd], 0)
        try:  # it leads a process group, which goes with it
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.set_blocking(self.verdict, False)
        try:
            text = os.read(self.verdict, 1 << 16)
        except BlockingIOError:
            text = b""
        os.close(self.verdict)
        os.close(self.pidfd)
        if timed_out:
            return Refusal(reason=f"its import takes longer than {TRIAL_TIMEOUT:.0f} s")
        if not text:
            words = _words(os.waitstatus_to_exitcode(status))
            return Refusal(reason=f"its import ends the process ({words})")
        reason, for_forks = json.loads(text)
        return Refusal(reason=reason, for_forks=for_forks) if reason else None


def try_import(module: str) -> Trial:
    """Begin a trial; its end shows on `pidfd`. Raises OSError."""
    verdict, write = os.pipe()
    standby = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(module, write, standby)
    os.close(write)
    return Trial(module=module, pid=pid, pidfd=os.pidfd_open(pid), verdict=verdict)


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def _run(module: str, write: int, standby: int) -> NoReturn:
    """In the child: import, look, tell, end."""
    try:
        os.setpgid(0, 0)
        set_pdeathsig()
        if os.getppid() == standby:
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            reason, for_forks = _judge(module)
            os.write(write, json.dumps([reason[:4096], for_forks]).encode())
    finally:
        os._exit(0)


def _judge(module: str) -> tuple[str, bool]:
    """The first reason against it, or ""; whether there is none but what a fork would lose."""
    before, seen = _devices(), _watch_environment()
    count = threads()
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - a module may raise anything
        return f"its import fails: {type(error).__name__}: {error}", False
    opened = sorted(_devices() - before)
    torch = sys.modules.get("torch")
    lost, wrong = [], []
    if threads() > count:
        lost.append(f"leaves {threads() - count} threads running")
    if torch is not None and torch.cuda.is_initialized():
        lost.append("initialises CUDA")
    if opened:
        lost.append(f"opens {', '.join(opened)}")
    if _children():
        wrong.append("leaves a process running")
    if seen:
        wrong.append(f"reads {', '.join(sorted(seen))}")
    reasons = [*wrong, *lost]
    return (f"its import {reasons[0]}", not wrong) if reasons else ("", False)


def _devices() -> set[str]:
    """Device files that are open here."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.startswith("/dev/") and not path.startswith(_HARMLESS_DEVICES):
            found.add(path)
    return found


def _children() -> str:
    try:
        with open("/proc/thread-self/children") as file:
            return file.read()
    except OSError:  # a kernel built without it
        return ""


def _watch_environment() -> set[str]:
    """From now on, the rank's variables that somebody asked for."""
    seen: set[str] = set()
    kind: Any = os._Environ  # the class of os.environ, so that `from os import environ` counts
    look_up = kind.__getitem__

    def __getitem__(self: object, name: object) -> object:
        if name in env.OF_TORCHRUN:
            seen.add(str(name))
        return look_up(self, name)

    kind.__getitem__ = __getitem__
    return seen


def _words(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"

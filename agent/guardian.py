"""The guardian: `elastic-run` itself. Starts the agent, and the master where this node has it, by
plain fork; starts each again when it dies; ends a master that hangs; passes signals on; ends what is left.

Single threaded, and imports neither grpc nor asyncio, so that a fork of it is always safe.
"""

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elastic.agent import cgroup, children, prctl, tasks
from elastic.agent.pulse import EVERY, Pulse
from elastic.agent.snapshots.vault import Vault
from elastic.proto import descriptors
from elastic.proto.exit_code import CRASHED, MASTER_LOST

log = logging.getLogger(__name__)

MOST_DEATHS = 20
"""Deaths of one child within a minute, other than by SIGKILL, after which the guardian gives up."""

MOST_BUGS = 3
"""The same, where it ended by itself with `CRASHED`."""

NO_MASTER = signal.SIGRTMIN
"""To the agent: its master ended with an error, and has said which."""


@dataclass(slots=True)
class _Child:
    name: str
    main: Callable[[], int]
    pid: int = 0
    code: int | None = None
    """Set once it ended for good."""
    told: list[int] = field(default_factory=list[int])
    """Signals passed on to it; a life that died may not have heard them, so each later one does."""
    again: bool = False
    """It died, and was started again."""
    deaths: list[float] = field(default_factory=list[float])


class Guardian:
    """Runs until the agent, and the master if there is one, have ended for good."""

    def __init__(
        self,
        agent: Callable[[], int],
        master: Callable[[], int] | None,
        vault: Vault,
        pulse: Pulse,
        cgroup_path: Path | None = None,
        patience: float = 60.0,
    ) -> None:
        self._patience = patience
        """Seconds after a signal until what has not ended is killed."""
        self._deadline: float | None = None
        self._cgroup = cgroup_path
        self._vault = vault
        self._pulse = pulse
        self._agent = _Child("agent", agent)
        self._master = None if master is None else _Child("master", master)
        self._wake, self._waker = socket.socketpair()
        self._received = b""
        """Signals that came and were not dealt with yet."""
        self._signalled = False
        self._warnings: tuple[int, ...] = ()
        self._handled: tuple[int, ...] = ()
        """What a child must not miss while it starts; its loop lets them through."""
        self.warned = False
        """A warning came."""
        self._stuck: set[int] = set()
        """Pids that SIGKILL did not end."""

    def run(self, signals: tuple[int, ...], warnings: tuple[int, ...] = ()) -> int:
        """Returns the exit code of the launcher.

        signals end this node; warnings, which say that it will be taken away, only reach the agent.
        """
        self._warnings = warnings
        self._handled = (*signals, *warnings)
        prctl.set_child_subreaper()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *self._handled):
            signal.signal(number, lambda *_: None)
        for child in self._children():
            self._start(child)
        try:
            while self._agent.code is None:
                self._wait_or_kill(self._agent)
            self._end_master()
        finally:
            self._end_all()
        if self._master is not None and self._master.code and not self._signalled:
            return self._master.code
        if self._agent.again and self._agent.code - 128 in self._handled:
            return 1  # a later life does not know that there was a round
        return self._agent.code

    def _wait_or_kill(self, child: _Child) -> None:
        """Wait for something to happen; past the deadline of a signal, not any longer."""
        if self._deadline is None:
            self._wait(None)
        elif time.monotonic() < self._deadline:
            self._wait(self._deadline - time.monotonic())
        else:
            log.error("the %s did not end in time and is killed", child.name)
            self._kill(child, signal.SIGKILL)
            self._deadline = time.monotonic() + self._patience

    def _children(self) -> list[_Child]:
        return [self._agent] if self._master is None else [self._master, self._agent]

    def _start(self, child: _Child) -> None:
        guardian = os.getpid()
        if child is self._master:
            self._pulse.begin()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*self._handled, NO_MASTER))
        child.pid = os.fork()
        if child.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number in child.told:
                self._kill(child, number)
            return
        code = CRASHED
        try:
            signal.set_wakeup_fd(-1)
            for number in signal.valid_signals():
                with contextlib.suppress(OSError, ValueError):
                    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
                        signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)  # a ^C at the terminal reaches the guardian alone, which passes it on
            if child is self._agent:
                cgroup.join(self._cgroup)
            prctl.set_pdeathsig(signal.SIGTERM)
            if os.getppid() == guardian:
                code = child.main()
        except BaseException:
            log.critical("the %s met a bug", child.name, exc_info=True)
        finally:
            logging.shutdown()
            os._exit(code)

    def _wait(self, timeout: float | None) -> None:
        """Wait for a signal or a child's end, and deal with it; see meanwhile that the master works."""
        if self._master is not None:
            timeout = EVERY if timeout is None else min(timeout, EVERY)
        self._sleep(0 if self._received else timeout)
        self._hear()
        self._reap()
        self._look()

    def _look(self) -> None:
        """End a master that hangs. Its next life begins once it is reaped, so never beside it."""
        master = self._master
        if master is None or not master.pid or not self._pulse.hangs(time.monotonic()):
            return
        state, where = tasks.stat(master.pid).state, tasks.wchan(master.pid)
        log.error(
            "the master has done nothing for %.0f s, though its process %d is there (state %s%s): it is killed",
            *(self._pulse.most, master.pid, state, where and f", in {where}"),
        )
        self._kill(master, signal.SIGKILL)
        self._pulse.begin()  # one that does not go away is told of once

    def _hear(self) -> None:
        """Pass on the signals that came."""
        self._sleep(0)
        received, self._received = self._received, b""
        for number in received:
            if number != signal.SIGCHLD:
                self._pass_on(number)

    def _sleep(self, timeout: float | None) -> None:
        """Until a signal comes, or a child has ended; `_wait` deals with what came."""
        kept = self._vault.fileno()
        if kept in descriptors.ready([self._wake.fileno(), kept], timeout):
            self._vault.take()
        with contextlib.suppress(BlockingIOError):
            self._received += self._wake.recv(4096)

    def _pass_on(self, number: int) -> None:
        if number in self._warnings:
            self.warned = True
        else:
            self._signalled = True
            if self._deadline is None:
                self._deadline = time.monotonic() + self._patience
        if self._agent.code is None:
            self._tell(self._agent, number)
        elif self._master is not None and self._signalled:
            self._tell(self._master, signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            children.forget(pid, status)
            for child in self._children():
                if child.pid == pid:
                    child.pid = 0
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        if child is self._agent:
            self._sweep(last=False)
            self._vault.take()  # what it passed on last, its next life begins with
            self._hear()  # a signal that came meanwhile decides whether there is another life
        if 0 <= code != CRASHED:
            child.code = code
            if child is self._master and code:
                self._tell(self._agent, NO_MASTER)
            return
        if self._signalled or (self._master is not None and self._master.code):
            child.code = 1
            return
        if child is self._master and -code in child.told:
            child.code = 0  # it was about to end by itself, and deaf to it no longer
            return
        how = f"signal {-code}" if code < 0 else "a bug"
        if code != -signal.SIGKILL:  # which strikes from outside, and says nothing of the next one
            now = time.monotonic()
            child.deaths = [t for t in child.deaths if now - t < 60] + [now]
        count = len(child.deaths)
        if count > (MOST_DEATHS if code < 0 else MOST_BUGS):
            log.error("the %s died %d times in a minute: giving up", child.name, count)
            child.code = 1
            return
        log.warning("the %s died (%s) and is started again", child.name, how)
        child.again = True
        self._start(child)

    def _end_master(self) -> None:
        """The agent has ended. Its master ends by itself once the job is over."""
        master = self._master
        if master is None:
            return
        if self._agent.code in (1, MASTER_LOST) or self._signalled:
            self._tell(master, signal.SIGTERM)
        while master.code is None:
            self._wait_or_kill(master)

    def _tell(self, child: _Child, number: int) -> None:
        """Signal this life of a child, and every later one."""
        if number not in child.told:
            child.told.append(number)
        self._kill(child, number)

    def _kill(self, child: _Child, number: int) -> None:
        if child.code is None and child.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _sweep(self, *, last: bool) -> None:
        """End everything that outlived the agent, but the master; who unlinks shared memory is waited
        for in the last sweep only."""
        keep = self._stuck | {child.pid for child in self._children() if child.pid}
        began = time.monotonic()
        cleaned, deadline = began + children.CLEANING, began + 10
        while left := children.orphans(keep, unlinkers=last):
            now = time.monotonic()
            if now >= deadline:
                break
            if thorough := now >= cleaned:
                cgroup.end(self._cgroup)
            for pid in left:
                children.kill_tree(pid, thorough=thorough)
            ended = [children.reap(pid) for pid in left]
            if not any(ended):  # each that ends is a child of ours
                self._sleep((deadline if thorough else cleaned) - now)
        self._stuck.update(left)

    def _end_all(self) -> None:
        for child in self._children():
            self._kill(child, signal.SIGKILL)
        for child in self._children():
            if child.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, 0)
                child.pid = 0
        self._sweep(last=True)
        deadline = time.monotonic() + 1
        while not cgroup.end(self._cgroup) and time.monotonic() < deadline:
            self._sleep(0.01)  # the last ones are on their way out

"""The ranks of one round on this node: started, watched, ended."""

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from elastic.agent import children, numa, oom
from elastic.agent.environment import rank_environment
from elastic.agent.evidence.dump import Target
from elastic.agent.file_timer import Timer
from elastic.agent.kernel_log import KernelLog
from elastic.agent.logs import logs
from elastic.agent.logs.logs import AttemptLogs, RankStreams
from elastic.agent.pace import Pace
from elastic.agent.rhythm import Rhythm
from elastic.agent.settings import AgentSettings
from elastic.agent.starters.spares import Spares
from elastic.agent.starters.spec import StartSpec
from elastic.agent.starters.starter import StartFailed
from elastic.agent.starters.starters import Starters
from elastic.proto import descriptors, link, page
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import LinkError, PageError, ProtocolMismatch
from elastic.proto.lost_workers import lost_workers

log = logging.getLogger(__name__)

ExitSeen = Callable[["Rank"], None]
MessageSeen = Callable[["Rank", link.Message], None]


class Rank:
    """One training process, from its start to its end."""

    def __init__(self, number: int, local_rank: int) -> None:
        self.number = number
        self.local_rank = local_rank
        self.pid = 0
        self.started_by = ""
        self.environ: dict[str, str] = {}
        self.streams: RankStreams | None = None
        self.error: link.ErrorNote | None = None
        self.expired: Timer | None = None
        """What it was ended for, if it was."""
        self.exit_code: int | None = None
        self.ended: asyncio.Future[int] | None = None
        self.page: mmap.mmap | None = None
        self.rhythm = Rhythm()
        self.interval = 0
        """Of how many steps it is wanted what they take; 0: of none."""
        self.pace = Pace()
        self.recorder: socket.socket | None = None
        """Where it may be asked for its collectives, once it offered that."""
        self.stacks: Target | None = None
        """Where it writes its stacks when it is asked by a signal."""
        self._link: socket.socket | None = None
        self._seen: MessageSeen = lambda rank, message: None
        self._closed: Callable[[Rank], None] = lambda rank: None
        self._passed: list[int] = []
        """Descriptors that came over the link and are nobody's yet."""
        self._parser = link.Parser()

    def open(self, seen: MessageSeen, closed: Callable[["Rank"], None]) -> dict[str, int]:
        """Make page and link; returns the rank's ends, which are the caller's to close.

        closed: the link is, by the rank or by the kernel, which ends the rank.
        """
        self._seen, self._closed = seen, closed
        fd = page.create()
        self.page = page.open_page(fd)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._link = ours
        asyncio.get_running_loop().add_reader(ours, self._readable)
        return {"page": fd, "link": theirs.detach()}

    def _readable(self) -> None:
        assert self._link is not None
        try:
            data, fds = descriptors.receive(self._link, 1 << 16, 4)
            self._passed += fds
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._close_link()
            self._closed(self)
            return
        for message in self._parser.feed(data):
            if isinstance(message, LinkError):
                log.warning("rank %d: %s", self.number, message)
                continue
            if isinstance(message, link.ErrorNote):
                self.error = message
            elif isinstance(message, link.RecorderOffered):
                self._keep_recorder()
            elif isinstance(message, link.StacksOffered) and self._passed:
                self._close_stacks()
                self.stacks = Target(fd=self._passed.pop(0), number=message.fd)
            self._seen(self, message)

    def passed(self) -> socket.socket | None:
        """The socket that came with a message; None where what came is none."""
        if not self._passed:
            return None
        fd = self._passed.pop(0)
        try:
            return socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            return None

    def _keep_recorder(self) -> None:
        if (end := self.passed()) is None:
            return
        self.close_recorder()
        end.setblocking(False)
        self.recorder = end

    def close_recorder(self) -> None:
        if self.recorder is not None:
            # Somebody may wait for its answer, and its number may soon be another file's.
            asyncio.get_running_loop().remove_reader(self.recorder)
            self.recorder.close()
            self.recorder = None

    def _close_stacks(self) -> None:
        if self.stacks is not None:
            os.close(self.stacks.fd)
            self.stacks = None

    def answer(self, message: link.Message) -> None:
        with contextlib.suppress(OSError):
            if self._link is not None:
                self._link.send(link.encode(message))

    def drain_link(self) -> None:
        """Take what the rank said last; it has ended."""
        while self._link is not None and _has_data(self._link):
            self._readable()

    def _close_link(self) -> None:
        if self._link is not None:
            asyncio.get_running_loop().remove_reader(self._link)
            self._link.close()
            self._link = None
        while self._passed:
            os.close(self._passed.pop())

    def close(self) -> None:
        self._close_link()
        self.close_recorder()
        self._close_stacks()
        if self.page is not None:
            self.page.close()
            self.page = None

    def progress(self) -> pb.RankProgress:
        """What its page says now."""
        self.listen()
        told = pb.RankProgress(rank=self.number, pid=self.pid, started_by=self.started_by)
        if self.page is not None:
            with contextlib.suppress(PageError, ProtocolMismatch):
                seen = page.read(self.page)
                told.step, told.ticks = max(0, seen.step or 0), max(0, seen.ticks)
                told.phase = _plain(seen.phase)
        if self.exit_code is None:
            told.quiet = self.rhythm.quiet(time.monotonic_ns())
        told.interval = self.rhythm.take()
        if (pace := self.pace.take()) is not None:
            told.pace.end, told.pace.compute = pace.end, pace.compute
            told.pace.waiting, told.pace.least = pace.waiting, pace.least
            if (device := pace.device) is not None:
                told.pace.device.CopyFrom(pb.PaceOnDevice(**asdict(device)))
            told.pace.stage = 0 if self.page is None else page.stage(self.page)
        return told

    def listen(self) -> None:
        """To its steps."""
        if self.page is None:
            return
        ticks, tick_ns, phase_ns = page.ticks(self.page)
        beats = page.beats(self.page, self.rhythm.beat)
        self.rhythm.hear(ticks, tick_ns, time.monotonic_ns(), phase_ns, beats)
        if self.interval:
            self.pace.hear_of_device(*page.device_steps(self.page, self.pace.heard_of_device))
            self.pace.hear(beats, self.interval)


_CANNOT_OPEN = 2
"""Python's exit code for a script that it cannot open."""


class Ranks:
    """All local ranks of one round."""

    def __init__(
        self,
        settings: AgentSettings,
        job: str,
        order: pb.Directive,
        starters: Starters,
        spares: Spares,
    ) -> None:
        """job: the job's own id."""
        self.round = order.round
        self.order = order
        self.ranks = [
            Rank(order.first_rank + local, local) for local in range(order.local_world_size)
        ]
        self.stopping = False
        self._stop_signal = 0
        """What told them to stop, if they got time for it."""
        self._stop_by = 0.0
        """When they are killed, in the loop's time, once they are told to stop."""
        self._settings = settings
        self._job = job
        self._starters = starters
        self._spares = spares
        self._logs = AttemptLogs(settings.logs, order.round, settings.role)
        self.strikes = oom.Strikes()
        visible = settings.workload.environ.get("CUDA_VISIBLE_DEVICES")
        self._kernel_log = KernelLog(visible)

    async def start(self, exit_seen: ExitSeen, message_seen: MessageSeen) -> None:
        """Start them all. Raises OSError or StartFailed; some may run then: `stop` ends them."""
        cwd = self._settings.workload.cwd
        if not os.path.isdir(cwd):
            raise StartFailed(f"the working directory {cwd} is gone")
        starts = [self._start(rank, exit_seen, message_seen) for rank in self.ranks]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        self._logs.follow()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _start(self, rank: Rank, exit_seen: ExitSeen, message_seen: MessageSeen) -> None:
        streams = self._logs.open(rank.number, rank.local_rank)
        rank.streams = streams
        spec = self._spec(rank, streams.error_file)
        rank.environ = spec.environ
        fds = {"stdout": streams.stdout, "stderr": streams.stderr}
        try:
            fds |= rank.open(message_seen, lambda rank: self._link_closed(rank, exit_seen))
            await self._launch(rank, spec, fds)
        finally:
            for fd in fds.values():
                os.close(fd)
        assert rank.ended is not None
        rank.ended.add_done_callback(lambda ended: self._ended(rank, ended, exit_seen))
        if self.stopping:
            children.signal_group(rank.pid, signal.SIGKILL)

    async def _launch(self, rank: Rank, spec: StartSpec, fds: dict[str, int]) -> None:
        """By a spare that waits for it, else by the standby, else by the spawner."""
        spare = self._spares.take(rank.local_rank)
        if spare is not None:
            with contextlib.suppress(OSError):
                await spare.order(spec, fds)
                rank.started_by, rank.pid, rank.ended = "spare", spare.pid, spare.ended
                return
        rank.started_by, rank.pid = await self._starters.start(spec, fds)
        rank.ended = children.watch(rank.pid)

    def _link_closed(self, rank: Rank, exit_seen: ExitSeen) -> None:
        """Where the kernel did that, the rank has failed, and the others need not wait until it can be reaped."""
        if self.stopping or rank.ended is None or rank.ended.done():
            return
        if (code := children.ending(rank.pid)) is not None:
            rank.exit_code = code
            exit_seen(rank)

    def _ended(self, rank: Rank, ended: "asyncio.Future[int]", exit_seen: ExitSeen) -> None:
        if ended.cancelled():
            return
        rank.drain_link()
        if rank.exit_code is not None:
            return  # seen when its link was closed
        rank.exit_code = ended.result()
        if not self.stopping:
            exit_seen(rank)
        elif why := self._mishap(rank):
            log.warning("rank %d failed while it stopped: %s", rank.number, why)

    def _mishap(self, rank: Rank) -> str:
        """What went wrong with a rank that had time to save; "" for any usual end."""
        code = rank.exit_code or 0
        if not self._stop_signal:
            return ""
        if code > 0 and rank.error is not None and rank.error.type != "KeyboardInterrupt":
            return f"{rank.error.type}: {rank.error.message}".partition("\n")[0]
        asked = {signal.SIGKILL, signal.SIGTERM, self._stop_signal}
        return f"signal {-code}" if code < 0 and -code not in asked else ""

    def _spec(self, rank: Rank, error_file: str) -> StartSpec:
        work = self._settings.workload
        local = str(rank.local_rank)
        return StartSpec(
            kind=work.kind,
            target=work.entry,
            args=tuple(arg.replace("${local_rank}", local) for arg in work.args),
            environ=rank_environment(
                self._settings, self._job, self.order, rank.local_rank, error_file
            ),
            cwd=work.cwd,
            python=work.python,
            cpus=self._cpus(rank.local_rank),
            threads=self._starters.threads,
            open_files=self._settings.open_files,
        )

    def _cpus(self, local_rank: int) -> tuple[int, ...] | None:
        settings = self._settings
        if settings.numa_binding is None:
            return None
        allowed = frozenset(os.sched_getaffinity(0))
        return numa.cpus(settings.numa_binding, local_rank, settings.gpu_nodes, allowed)

    def kernel_log(self, *, struck: bool, message: str = "") -> list[str]:
        """What has to do with us of what the kernel has just recorded; struck: see there; message: of a rank's exception."""
        pids = {rank.pid for rank in self.ranks} | lost_workers(message)
        return self._kernel_log.lines(pids, struck=struck)

    def failure(self, rank: Rank) -> pb.RankFailure:
        """How a rank ended, for the master."""
        folder = rank.streams.folder if rank.streams else None
        struck = self.strikes.recent
        message = "" if rank.error is None else rank.error.message
        # A shell says 128 more of what it ran.
        by_kill = rank.exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        told = pb.RankFailure(
            rank=rank.number,
            local_rank=rank.local_rank,
            exit_code=rank.exit_code or 0,
            log_tail=logs.tail(folder, 4096),
            oom_killed=struck and (by_kill or bool(lost_workers(message))),
            kernel_log=self.kernel_log(struck=struck, message=message),
        )
        if told.exit_code > 0 and (full := self._logs.full):
            told.what, told.message = pb.RankFailure.LOG, _plain(str(full))
        elif rank.expired is not None and told.exit_code == -rank.expired.signal:
            told.what = pb.RankFailure.TIMER
            told.message = f"its timer {rank.expired.scope!r} expired"
        elif rank.error is not None:
            told.error_type = _plain(rank.error.type)
            told.message = _plain(rank.error.message)
            told.frame = _plain(rank.error.frame)
        elif rank.exit_code == _CANNOT_OPEN and (missing := self._missing_script()):
            told.message = _plain(f"there is no {missing} on this node")
        return told

    def _missing_script(self) -> str:
        work = self._settings.workload
        path = os.path.join(work.cwd, work.entry)
        return path if work.kind == "script" and not os.path.exists(path) else ""

    @property
    def pids(self) -> dict[int, int]:
        """Pid by local rank, of those that run."""
        return {rank.local_rank: rank.pid for rank in self.running()}

    @property
    def ended(self) -> list[int]:
        """Those that ended with 0."""
        return [rank.number for rank in self.ranks if rank.exit_code == 0]

    @property
    def finished(self) -> bool:
        return len(self.ended) == len(self.ranks)

    def error_file(self, rank: Rank) -> Path | None:
        """The rank's error file, if it wrote one."""
        if rank.streams is None or not rank.streams.error_file:
            return None
        path = Path(rank.streams.error_file)
        return path if path.is_file() else None

    def expire(self, timer: Timer) -> None:
        """End the rank that holds `timer`, or of whose session the process is that does."""
        try:
            leader = os.getsid(timer.pid)
        except (ProcessLookupError, PermissionError):
            return
        for rank in self.running():
            if rank.pid == leader:
                rank.expired = timer
                os.kill(rank.pid, timer.signal)

    def send_signal(self, number: int) -> None:
        """Send a signal to every rank's process group; SIGKILL spares who unlinks shared memory."""
        for rank in self.running():
            if number == signal.SIGKILL:
                children.kill_tree(rank.pid)
            else:
                children.signal_group(rank.pid, number)

    def running(self) -> list[Rank]:
        return [r for r in self.ranks if r.ended is not None and not r.ended.done()]

    async def wait(self, timeout: float) -> bool:
        """Whether all have ended within `timeout` seconds."""
        waiting = [r.ended for r in self.running() if r.ended is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout)
        return not self.running()

    async def stop(self, grace: float, number: int = signal.SIGTERM) -> list[Rank]:
        """End them: a signal, `grace` seconds, SIGKILL. Returns those that SIGKILL did not end."""
        self.stopping, self._stop_signal = True, number if grace > 0 else 0
        self.send_signal(number)
        self.give_time(grace)
        clock = asyncio.get_running_loop().time
        while (left := self._stop_by - clock()) > 0 and not await self.wait(left):
            pass  # it may have got more
        if self.running():
            self.send_signal(signal.SIGKILL)
            await self.wait(self._settings.kill_timeout)
        stuck = self.running()
        try:
            await self._logs.close()
        finally:
            self._kernel_log.close()
            for rank in self.ranks:
                rank.close()
        return stuck

    def give_time(self, grace: float) -> None:
        """No SIGKILL for `grace` seconds from now, if there was none yet."""
        until = asyncio.get_running_loop().time() + grace
        self._stop_by = max(self._stop_by, until)


def _plain(text: str) -> str:
    """What UTF-8 can carry; names of files may hold bytes that are none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _has_data(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1, socket.MSG_PEEK))
    except (BlockingIOError, ConnectionError):
        return False

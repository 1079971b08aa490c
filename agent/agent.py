"""The agent: makes one node do what the master says, and tells what happened. It never decides."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from elastic.agent import children, error_file, guardian, prctl
from elastic.agent.file_timer import Server, Timer
from elastic.agent.last_words import LastWords
from elastic.agent.logs.reads import LogReads
from elastic.agent.outcome import Outcome
from elastic.agent.probing import Probing
from elastic.agent.ranks import Rank, Ranks
from elastic.agent.retiring import Retiring, time_left
from elastic.agent.settings import AgentSettings
from elastic.agent.snapshots.snapshots import PERSIST_TIMEOUT, Snapshots
from elastic.agent.snapshots.vault import Vault
from elastic.agent.starters.spares import Spares
from elastic.agent.starters.starters import Starters
from elastic.agent.stores import Stores
from elastic.agent.uplink import Uplink
from elastic.agent.watching import Watching
from elastic.proto import knock, link, version
from elastic.proto import master_pb2 as pb
from elastic.proto.deaf import deafen
from elastic.proto.ending import Ended
from elastic.proto.errors import ElasticError, MasterRefused, MasterUnreachable
from elastic.proto.job_folder import newest_metrics
from elastic.proto.limits import lift_open_files

log = logging.getLogger(__name__)


class Agent:
    """One life of a node's agent. Everything runs on one event loop."""

    def __init__(self, settings: AgentSettings, knock_socket: socket.socket, vault: Vault) -> None:
        self._settings = settings
        self._guardian = os.getppid()
        self._incarnation = int.from_bytes(os.urandom(7), "big") | 1
        self._knock_socket = knock_socket
        self._starters = Starters(settings)
        self._spares = Spares(settings, self._starters)
        self._stores = Stores(settings, self._starters, self._store_lost, self._spare_changed)
        self._uplink = Uplink(settings.master, settings.security, self._hello, self._heard)
        self._log_reads = LogReads(settings.logs.run_dir, self._uplink, self._spawn)
        self._snapshots = Snapshots(
            settings,
            vault,
            lambda: self._uplink.job_uid,
            self._say_of_snapshots,
            self._show_slots,
        )
        self._ranks: Ranks | None = None
        self._watching = Watching(lambda: self._ranks, self._uplink.send, self._send_heartbeat)
        self._metrics, self._reading_metrics = "", False
        self._retiring = Retiring(
            self._spawn,
            lambda: self._sweep(self._known, self._starters.settled),
            lambda: self._take_signal(0),
        )
        self._probing = Probing(
            settings, self._uplink.send, self._spawn, self._retiring.over, self._stores.serve
        )
        self._preparing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._stepped = False
        """A rank of this round has finished a step."""
        self._outcome = Outcome(self._uplink.send)
        self._unit = 0
        self._order: pb.Directive | None = None
        self._ordered = asyncio.Event()
        self._signal: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """An exception that nobody waits for."""
        self._draining = ""
        """Why this node asks to be drained, if it does."""
        self._error_file: Path | None = None
        self._last_words = LastWords(settings.termination_log, detailed=settings.detailed_codes)

    async def run(self) -> int:
        """Work until told to end; returns the launcher's exit code."""
        prctl.set_child_subreaper()
        loop = asyncio.get_running_loop()
        handled = self._handle_signals(loop)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what came while this life started, too
        knocks = await asyncio.start_server(self._answer_knock, sock=self._knock_socket)
        uplink = loop.create_task(self._uplink.run(self._patience))
        uplink.add_done_callback(lambda _: self._snapshots.unheard())
        loop.set_exception_handler(self._mishap)
        pipe = self._settings.timer_pipe
        timers = None if pipe is None else Server(pipe, self._timer_expired)
        beats = self._spawn(self._beat())
        watch = self._spawn(self._watching.run())
        if self._settings.rank_start == "fork":
            self._fork_at_once()
        strays = self._spawn(children.reap_strays(self._known, self._starters.settled))
        work = loop.create_task(self._obey())
        try:
            ends: set[asyncio.Future[Any]] = {uplink, work, self._signal, self._bug}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if uplink.done() and uplink.exception() is None:  # cut off, with its last order
                await asyncio.wait(ends - {uplink}, return_when=asyncio.FIRST_COMPLETED)
            work.cancel()  # what the master says from now on changes nothing
            if self._bug.done():
                self._bug.result()
            if self._signal.done():
                knocks.close()  # gone, whether or not a master is there to be told
                return await self._leave(self._signal.result())
            if work.done():
                return await self._end(work.result())
            return await self._give_up(uplink.exception())
        finally:
            for task in (uplink, beats, watch, strays, work):
                task.cancel()
            self._probing.cancel()
            knocks.close()
            if timers is not None:
                timers.close()
            for parts in (self._spares, self._stores, self._starters, self._snapshots):
                parts.kill()
            await self._sweep(lambda: self._retiring.stuck)
            deafen(handled)

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> Iterable[int]:
        """Returns their numbers."""
        handlers: dict[int, Callable[[], None]] = {}
        for name in self._settings.drain_signals:
            handlers[signal.Signals[name]] = partial(self._ask_drain, name)
        for name in self._settings.signals:
            handlers[signal.Signals[name]] = partial(self._take_signal, signal.Signals[name])
        handlers[guardian.NO_MASTER] = partial(self._take_signal, 0)
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        return handlers

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose exception ends this life of the agent."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_with(error)

    def _mishap(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio has for exceptions of callbacks and of tasks that nobody asked."""
        loop.default_exception_handler(context)
        self._fail_with(context.get("exception") or RuntimeError(context.get("message")))

    def _fail_with(self, error: BaseException) -> None:
        if not self._bug.done():
            self._bug.set_exception(error)

    # --- what the master says ----------------------------------------------------------------

    def _hello(self) -> pb.Hello:
        self._log_reads.end()
        settings = self._settings
        sockname = self._knock_socket.getsockname()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        return pb.Hello(
            version=pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
            run_id=settings.run_id,
            job_uid=self._uplink.job_uid,
            epoch=self._uplink.epoch,
            node_id=settings.node_id,
            incarnation=self._incarnation,
            slots=settings.slots,
            host=settings.host,
            knock_address=f"{host}:{sockname[1]}",
            role=settings.role,
            labels=dict(settings.labels),
            node_rank=settings.node_rank,
            report=self._outcome.report,
            spare_store=self._stores.address,
            snapshots=self._snapshots.statements(),
            stands=self._snapshots.stands(),
        )

    def _say_of_snapshots(self, told: pb.Snapshots | pb.Stand) -> None:
        if isinstance(told, pb.Stand):
            self._uplink.send(pb.FromAgent(stand=told))
        else:
            self._uplink.send(pb.FromAgent(snapshots=told))

    def _heard(self, message: pb.ToAgent) -> None:
        if message.HasField("directive"):
            order = message.directive
            if order.epoch < self._uplink.epoch:
                return
            if self._order is None or order.round >= self._order.round:
                self._order = order
                self._ordered.set()
        elif message.HasField("read_log"):
            self._log_reads.take(message.read_log)
        elif message.HasField("snapshots"):
            self._snapshots.obey(message.snapshots)
        elif message.HasField("leave"):
            self._snapshots.leave(message.leave)
        elif message.HasField("look"):
            self._spawn(self._look(message.look))
        elif message.HasField("watch"):
            self._watching.obey(message.watch)
        elif message.HasField("measure"):
            self._watching.measure(message.measure)
        elif message.HasField("examine"):
            self._spawn(self._watching.examine(message.examine))

    async def _look(self, asked: pb.Look) -> None:
        self._uplink.send(pb.FromAgent(found=await self._snapshots.look(asked)))

    async def _obey(self) -> pb.Directive:
        """Make the node do what the newest directive says; returns it once it says exit."""
        while True:
            await self._ordered.wait()
            self._ordered.clear()
            order = self._order
            assert order is not None
            if self._ranks is not None and (
                order.kind != pb.Directive.RUN or order.round != self._ranks.round
            ):
                self._retire(order.stop_grace)
            if order.kind == pb.Directive.EXIT:
                self._uplink.last()
                await self._retiring.over()
                await self._stores.unused()
                await self._uplink.synced()
                given_up = f"; ^C or SIGTERM gives it up in {self._settings.shutdown_timeout:g} s"
                await self._snapshots.persisted(PERSIST_TIMEOUT, given_up)
                if not order.goes_on:  # else others have what it had
                    self._snapshots.say_lost()
                return order
            self._probing.obey(order.probe)
            if order.kind == pb.Directive.WAIT:
                self._stores.retire()
                self._stores.discard(order.store)
                self._outcome.idle(order.round)
                if order.prepare and self._preparing is None:
                    self._starters.prepare()
                    self._preparing = self._spawn(self._say_prepared())
            elif self._ranks is None and order.round > self._outcome.round:
                await self._cleared(order)
                await _first_of(self._starters.forkable(), self._ordered.wait())
                if not self._ordered.is_set():
                    await self._start_ranks(order)

    def _fork_at_once(self) -> None:
        if self._starters.reason:
            log.warning("--rank-start fork: ranks are spawned: %s", self._starters.reason)
        self._starters.prepare()

    async def _start_ranks(self, order: pb.Directive) -> None:
        self._outcome.running(order.round)
        try:
            if not self._stores.use(order.store) and order.node_rank == 0:
                self._store_lost()  # nobody serves it; the next round gets our new one
                return
            self._stepped = False
            self._ranks = Ranks(
                self._settings, self._uplink.job_uid, order, self._starters, self._spares
            )
            await self._ranks.start(self._exit_seen, self._message_seen)
        except (OSError, ValueError, ElasticError) as error:
            log.error("round %d cannot start here: %s", order.round, error)
            failure = pb.RankFailure(
                rank=order.first_rank, exit_code=1, what=pb.RankFailure.START, message=str(error)
            )
            self._outcome.failed(failure)
            return
        kinds = ", ".join(sorted({rank.started_by for rank in self._ranks.ranks}))
        log.info("round %d: %d ranks started by %s", order.round, len(self._ranks.ranks), kinds)

    def _retire(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Begin to end the ranks that run; `_retiring.over` waits for it.

        With a grace, in which they may save, their store stays too.
        """
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            self._retiring.begin(ranks, grace, number)
            asyncio.get_running_loop().call_soon(self._snapshots.release, ranks.round)
            if grace > 0:
                self._stores.retire(grace)

    async def _cleared(self, order: pb.Directive) -> None:
        """Wait until the ranks before are gone, or spares find room beside them."""
        if not self._retiring:
            return
        waits = [self._retiring.over()]
        if order.stop_grace <= 0 and self._spares.complete(order.local_world_size):
            waits.append(self._spares.room())
        await _first_of(*waits)

    async def _sweep(
        self, known: Callable[[], set[int]], settled: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        left = await children.sweep(known, self._settings.kill_timeout, settled)
        await self._retiring.leave_behind(left)

    def _known(self) -> set[int]:
        """Our children that are no orphans."""
        known = self._starters.pids | self._stores.pids | self._spares.pids | self._snapshots.pids
        running = set[int]() if self._ranks is None else set(self._ranks.pids.values())
        known |= self._watching.pids | self._probing.pids
        return known | running | self._retiring.pids | self._retiring.stuck

    # --- what happens here -------------------------------------------------------------------

    def _exit_seen(self, rank: Rank) -> None:
        ranks = self._ranks
        if ranks is None or self._outcome.round != ranks.round:
            return
        if not self._outcome.failures and (rank.exit_code or ranks.finished):
            self._send_heartbeat()  # how far they came, before what ended it
        if rank.exit_code:
            if not self._stepped:
                self._spares.judge(rank.started_by, rank.exit_code)
            if not self._outcome.failures:
                self._error_file = ranks.error_file(rank)
            self._outcome.failed(ranks.failure(rank))
        elif ranks.finished:
            self._outcome.finished()
        else:
            self._outcome.ended(ranks.ended)

    def _store_lost(self) -> None:
        failure = pb.RankFailure(
            what=pb.RankFailure.STORE,
            exit_code=1,
            message="the store died",
            oom_killed=self._ranks is not None and self._ranks.strikes.recent,
        )
        self._outcome.failed(failure)

    def _spare_changed(self, address: str) -> None:
        self._uplink.send(pb.FromAgent(spare_store=pb.SpareStore(address=address)))

    def _message_seen(self, rank: Rank, message: link.Message) -> None:
        ranks = self._ranks
        if ranks is None:
            return
        if isinstance(message, link.TorchNote):
            local_ranks = len(ranks.ranks)
            self._stores.expected()
            self._starters.note_torch(rank.local_rank, local_ranks, rank.environ, message.environ)
        elif isinstance(message, link.ModulesNote):
            self._starters.note_modules(message.modules)
            self._starters.note_environment(rank.environ, message.environ)
            self._spares.note(rank.local_rank, rank.environ, message)
        elif isinstance(message, link.FirstStep):
            self._stepped = True
            self._send_heartbeat()
        elif isinstance(message, link.KeeperAsked):
            if (end := rank.passed()) is not None:
                self._snapshots.open(end, ranks.round)
        elif isinstance(message, link.UnitAsked):
            self._unit = message.ranks
            unit = pb.UnitDeclared(round=ranks.round, unit=message.ranks)
            self._uplink.send(pb.FromAgent(unit=unit))
            world = ranks.order.world_size
            fits = world % message.ranks == 0
            reason = "" if fits else f"{world} ranks are no multiple of {message.ranks}"
            rank.answer(link.UnitAnswered(reason=reason))

    def _show_slots(self) -> None:
        """To the spare ranks, which are to know their slots ahead of their round."""
        self._spares.show(self._snapshots.touched())

    def _timer_expired(self, timer: Timer) -> None:
        if self._ranks is not None:
            self._ranks.expire(timer)

    # --- signs of life -----------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await self._uplink.attached.wait()
            await asyncio.sleep(self._uplink.heartbeat_interval)  # Hello has just said all
            self._send_heartbeat()
            if not self._reading_metrics:
                self._reading_metrics = True
                self._spawn(self._read_metrics())
            if self._draining:
                self._say_draining()  # what was lost is said again, here and below
            if self._unit and self._ranks is not None:
                unit = pb.UnitDeclared(round=self._ranks.round, unit=self._unit)
                self._uplink.send(pb.FromAgent(unit=unit))
            if self._stepped and self._ranks is not None and not self._busy_looking():
                self._looking = self._spawn(self._spares.look(partial(_training, self._ranks)))
                self._show_slots()

    async def _say_prepared(self) -> None:
        await self._starters.standby_ready.wait()
        self._send_heartbeat()

    async def _read_metrics(self) -> None:
        """In a thread: the folder may be on a file system that hangs."""
        folder = self._settings.logs.run_dir
        if folder is not None:
            self._metrics = await asyncio.to_thread(newest_metrics, folder)
        self._reading_metrics = False

    def _busy_looking(self) -> bool:
        return self._looking is not None and not self._looking.done()

    def _send_heartbeat(self) -> None:
        beat = pb.Heartbeat(
            round=self._outcome.round, plain=self._starters.plain, prepared=self._starters.prepared
        )
        if self._ranks is not None:
            self._ranks.strikes.look()
            beat.ranks.extend(rank.progress() for rank in self._ranks.ranks)
            beat.metrics = self._metrics if any(rank.rank == 0 for rank in beat.ranks) else ""
        self._uplink.send(pb.FromAgent(heartbeat=beat))

    async def _answer_knock(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            writer.write(knock.answer(self._incarnation))
            await writer.drain()
        writer.close()

    def _patience(self) -> float:
        """With ranks that train, a master's absence is no reason to end."""
        training = self._ranks is not None and self._ranks.pids
        return float("inf") if training else self._settings.join_timeout

    # --- the end -----------------------------------------------------------------------------

    def _take_signal(self, number: int) -> None:
        self._retiring.hear(number)
        if not self._signal.done():
            self._signal.set_result(number)

    def _ask_drain(self, name: str) -> None:
        """A warning that this node will be taken away, such as Slurm's, or Kubernetes' SIGTERM."""
        number = signal.Signals[name]
        if os.getppid() != self._guardian:  # whose death reaches us as a SIGTERM
            self._take_signal(number)
            return
        if number == signal.SIGTERM and not self._uplink.attached.is_set():
            loop, patience = asyncio.get_running_loop(), self._settings.shutdown_timeout
            loop.call_later(patience, self._unheard, number)
        log.warning("%s: asking the master to drain this node", name)
        self._draining = f"its launcher got {name}"
        self._say_draining()

    def _unheard(self, number: int) -> None:
        """No master came to be asked."""
        if not self._uplink.attached.is_set():
            self._take_signal(number)

    def _say_draining(self) -> None:
        self._uplink.send(pb.FromAgent(leaving=pb.Leaving(reason=self._draining, drain=True)))

    async def _end(self, order: pb.Directive) -> int:
        """The master says exit."""
        self._uplink.leave(order.reason)
        await self._uplink.goodbye(1.0)
        if order.exit_code == 1:
            log.error("%s", order.reason)
            failures = self._outcome.failures
            code = failures[0].exit_code if failures else None
            environ = self._settings.workload.environ
            error_file.hand_on(self._error_file, environ, order.reason, code)
        elif order.exit_code:
            log.warning("%s: start it again to go on", order.reason or "drained")
        return self._last_words.ordered(order)

    async def _leave(self, number: int) -> int:
        """A signal to the launcher, or a process that does not end: this node leaves."""
        started = self._outcome.round > 0
        orphaned = os.getppid() != self._guardian  # whose death reaches us as a SIGTERM
        if self._retiring.unkillable:
            kind, reason, code = Ended.HARDWARE, self._retiring.unkillable, 1
        elif not number:
            kind, reason, code = Ended.MASTER_LOST, "its master ended", 1
        else:
            kind, name = Ended.STOPPED, signal.Signals(number).name
            reason = "its launcher died" if orphaned else f"its launcher got {name}"
            code = 1 if started else 128 + number
            ranks = self._ranks is not None or self._retiring
            grace = self._settings.shutdown_timeout if ranks else 0.0
            log.warning("%s: ending%s", reason if orphaned else name, time_left(grace, number))
        told = self._order if number else None
        exits = told is not None and told.kind == pb.Directive.EXIT
        if not exits:
            self._uplink.leave(reason)
        for parts in (self._retiring, self._stores):
            parts.give_time(self._settings.shutdown_timeout)
        self._retire(self._settings.shutdown_timeout, number or signal.SIGTERM)
        await self._retiring.over()
        await self._stores.unused()
        if not orphaned:  # else its place may be taken by now
            await self._uplink.synced()  # what ranks had last may be ordered to storage
            await self._snapshots.persisted(self._settings.shutdown_timeout)
            self._snapshots.say_lost()
        if told is not None and exits:
            return await self._end(told)
        await self._uplink.goodbye(1.0)
        return self._last_words.left(kind, reason, code)

    async def _give_up(self, error: BaseException | None) -> int:
        """The master refused, or was never found."""
        self._retire(0.0)
        await self._retiring.over()
        if not isinstance(error, (MasterRefused, MasterUnreachable)):
            raise error or RuntimeError("the stream to the master ended")
        log.error("%s", error)
        return self._last_words.gave_up(error)


def _training(ranks: Ranks) -> dict[int, int]:
    """Those that run, as long as their round is not being ended."""
    return {} if ranks.stopping else ranks.pids


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for one of them; the others are given up."""
    tasks = [asyncio.get_running_loop().create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def main(settings: AgentSettings, knock_socket: socket.socket, vault: Vault) -> int:
    """Run an agent; returns the exit code of the launcher."""
    lift_open_files()  # several for each rank; a store holds one for each of the world

    async def run() -> int:
        return await Agent(settings, knock_socket, vault).run()

    try:
        return asyncio.run(run())
    except ElasticError as error:
        log.error("%s", error)
        return 1

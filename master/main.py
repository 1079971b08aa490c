"""A master's life: open the journal, listen, serve until the job is over."""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from elastic.master import events as ev
from elastic.master.control import Control
from elastic.master.journal import Journal
from elastic.master.launcher import Launcher, Master
from elastic.master.notify import Notifier
from elastic.master.policy import Policy
from elastic.master.report import report
from elastic.master.served import Served
from elastic.master.shell import Shell, pause
from elastic.master.state import Job, Result
from elastic.master.streams import Streams
from elastic.proto import job_folder, master_pb2_grpc, process
from elastic.proto.client import open_server
from elastic.proto.deaf import deafen
from elastic.proto.env import process_environment
from elastic.proto.errors import ElasticError, JournalFull, UsageError
from elastic.proto.exit_code import CRASHED
from elastic.proto.limits import lift_open_files
from elastic.proto.security import Security

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between two signs that the event loop runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings:
    run_id: str
    address: str
    """host:port, as agents dial it."""
    listen: str = ""
    """host:port to listen on, where that is another."""
    run_dir: Path
    """Holds journal and report."""
    policy: Policy
    security: Security
    report: Path | None = None
    """Where the report is written too."""
    node_id: str = ""
    """Of the launcher's own agent."""
    launch: str = field(default_factory=lambda: uuid4().hex)
    """Of the launcher; each life of its master has the same, and one after a result only ends."""
    notify: tuple[str, ...] = ()
    """Who is told of what goes wrong, and of the end: URLs and shell commands."""
    job_uid: str = ""
    """Of a new job; empty: one is made up."""
    least_epoch: int = 0
    """No lower one is taken: masters whose journal was lost may have had it."""
    least_round: int = 0
    """Likewise."""
    beat: Callable[[], None] | None = None
    """Called every second while it serves: a launcher sees by it that it does not hang."""


async def serve(
    settings: MasterSettings,
    launcher: Launcher | None = None,
    told_to_end: asyncio.Event | None = None,
) -> Result | None:
    """Serve one job to its end, which is returned; launcher: gives it its nodes; told_to_end: of a caller that minds
    SIGTERM itself."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_mishap)
    guardian = os.getppid()
    if told_to_end is None:
        told_to_end = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, told_to_end.set)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what came while this life started, too
    last = job_folder.read_note(settings.run_dir)
    again = last is not None and last.launch == settings.launch
    begun = again or os.path.exists(settings.run_dir / job_folder.JOURNAL)
    journal = await _open(settings.run_dir / job_folder.JOURNAL, again, told_to_end)
    with contextlib.closing(journal):
        notifier = Notifier(settings.notify, settings.run_id, process_environment())
        tell = notifier.tell if settings.notify else None
        shell = Shell(
            journal,
            settings.policy,
            settings.launch,
            tell,
            job_uid=settings.job_uid,
            least_epoch=settings.least_epoch,
            least_round=settings.least_round,
        )
        streams = Streams(shell, settings.run_id, settings.run_dir)
        await shell.begin(streams.act, last if begun else None, told_to_end)
        async with _listening(settings, shell, streams, journal):
            if shell.job.result is None:
                _put_report_aside(settings.run_dir, shell.job)
            _write_note(settings, shell.job)
            if launcher is None:
                ending = _stop_when(told_to_end, shell, streams, guardian, settings.node_id)
            else:
                ending = _go_when(told_to_end, streams)
            beside = [ending, streams.watch_silence()]
            if settings.beat is not None:
                beside.append(_beat(settings.beat))
            if launcher is not None:
                beside.append(_supply(launcher, Served(shell, streams)))
            tasks = [loop.create_task(one) for one in beside]
            try:
                await streams.over.wait()
                if shell.job.result is not None:
                    _write_report(shell, settings)
                    await streams.farewell(shell.job.stop_grace + 15.0)
                await notifier.close()
            finally:  # also where another master has taken over, and this is cancelled
                for task in tasks:
                    task.cancel()
    return shell.job.result


@contextlib.asynccontextmanager
async def _listening(
    settings: MasterSettings, shell: Shell, streams: Streams, journal: Journal
) -> AsyncIterator[None]:
    listen = settings.listen or settings.address
    try:
        server = open_server(listen, settings.security)
    except RuntimeError as error:
        raise UsageError(
            f"cannot listen on {listen}: is another program using the port?"
        ) from error
    open_admin = bool(settings.security.token)
    control = Control(shell, streams, journal, settings.run_id, open_admin=open_admin)
    master_pb2_grpc.add_MasterServicer_to_server(streams, server)
    master_pb2_grpc.add_ControlServicer_to_server(control, server)
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
        yield
    finally:
        await (
            starting
        )  # cancelled in the midst of that, gRPC fails later, where nobody waits for it
        await server.stop(grace=0.2)


async def _serve(settings: MasterSettings) -> None:
    await serve(settings)
    deafen((signal.SIGTERM,))


async def _go_when(told_to_end: asyncio.Event, streams: Streams) -> None:
    """A master that a cluster takes away comes back elsewhere, and ranks train on meanwhile."""
    await told_to_end.wait()
    streams.over.set()


async def _beat(beat: Callable[[], None]) -> None:
    while True:
        beat()
        await asyncio.sleep(BEAT)


async def _supply(launcher: Launcher, master: Master) -> None:
    """A bug in it ends this life of the master, and its next one lists everything anew."""
    try:
        await launcher.run(master)
    except Exception:
        log.critical("the launcher met a bug", exc_info=True)
        logging.shutdown()
        os._exit(CRASHED)


async def _stop_when(
    told_to_end: asyncio.Event, shell: Shell, streams: Streams, guardian: int, node_id: str
) -> None:
    """After a SIGTERM: from the guardian, whose agent has ended then, or because that died."""
    await told_to_end.wait()
    told = os.getppid() == guardian
    streams.flush()
    what = "was told to end" if told else "died"
    shell.fold(ev.Stopping(f"the launcher on the master's node {what}"))
    if told:
        streams.ended(ev.NodeId(node_id))
    if shell.stuck:  # as if killed: the journal has all that was decided
        log.error("ending with what the journal has; the same command goes on from there")
        streams.over.set()


async def _open(path: Path, again: bool, told_to_end: asyncio.Event) -> Journal:
    """again: a master of this launcher wrote it before; ranks train on until the disk has space."""
    said = False
    while True:
        try:
            return Journal(path)
        except JournalFull as error:
            if not again or told_to_end.is_set():
                raise
            if not said:
                log.error("%s; ranks go on, nothing is decided until it can be written", error)
            said = True
            await pause(told_to_end)


def _put_report_aside(folder: Path, job: Job) -> None:
    try:
        job_folder.put_report_aside(folder, job.epoch - 1)
    except OSError as error:
        log.error("the report of the job's last life will be replaced: %s", error)


def _write_note(settings: MasterSettings, job: Job) -> None:
    note = job_folder.MasterNote(
        address=settings.address,
        run_id=settings.run_id,
        pid=os.getpid(),
        began=process.began(os.getpid()),
        launch=settings.launch,
        job_uid=job.uid,
        epoch=job.epoch,
    )
    try:
        job_folder.write_note(settings.run_dir, note)
    except OSError as error:
        log.error("elasticctl will not find this job by its folder: %s", error)


def _write_report(shell: Shell, settings: MasterSettings) -> None:
    text = json.dumps(report(shell.job, shell.now()), indent=2) + "\n"
    for path in (settings.run_dir / job_folder.REPORT, settings.report):
        if path is None:
            continue
        draft = path.with_name(path.name + ".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            os.replace(draft, path)
        except OSError as error:
            log.error("cannot write the report %s: %s", path, error.strerror)
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _make_room() -> None:
    """Let this process hold a stream for each of thousands of agents."""
    lift_open_files()
    # What streams hold lives long: some 80 objects each, and a collection that walks through those
    # of thousands stops the master for a quarter of a second. By default one comes with each round.
    gc.set_threshold(100_000, 50, 100)


def _mishap(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception that nobody waits for: end at once, the guardian starts the next life."""
    loop.default_exception_handler(context)
    if context.get("exception") is not None:
        os._exit(CRASHED)


def main(settings: MasterSettings) -> int:
    """Serve; returns the exit code of the process."""
    _make_room()
    try:
        asyncio.run(_serve(settings))
    except ElasticError as error:
        log.error("%s", error)
        return 1
    return 0

"""Keeps a spare rank for each device, where the script uses GPUs and memory allows."""

import array
import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from elastic.agent import children
from elastic.agent.environment import mark
from elastic.agent.settings import AgentSettings
from elastic.agent.starters.gpus import Gpus
from elastic.agent.starters.spare import FAILED, MOST_FDS, READY, SLOTS, TAKEN, UNREHEARSED
from elastic.agent.starters.spec import StartSpec
from elastic.agent.starters.starter import StartFailed
from elastic.agent.starters.starters import Starters, changes
from elastic.proto import descriptors, env
from elastic.proto.errors import StarterDied
from elastic.proto.link import ModulesNote

log = logging.getLogger(__name__)

NEEDS = 3 << 30
"""Bytes free on a device before a spare is forked there; it takes about 0.7 GB."""
SHORT = 1 << 30
"""Bytes free below which a spare is given up."""
MOST_UNREADY = 3
"""Spares of a node that may end by themselves before they are ready, those that were to rehearse not counted: after
the first one of these none rehearses any more."""
MOST_SECONDS = 120.0
"""That a spare may take to be ready, from its fork."""
PATIENCE = 3.0
"""Seconds that a spare gets to say that it has its orders, which may find it in the driver; to start another one
takes longer."""
LOOK = 0.01
"""Seconds between looks at a device that is being emptied; NVML offers no event for it."""


class Spare:
    """One waiting process."""

    def __init__(
        self, pid: int, orders: socket.socket, *, rehearses: bool, say: Callable[[str], None]
    ) -> None:
        """say: is told why it did not rehearse."""
        self.pid = pid
        self.rehearses = rehearses
        self.ended = children.watch(pid)
        self.was_ready = False
        self.failed = ""
        """Why its device could not be warmed up."""
        self.registered = False
        """It has all slots that it was shown."""
        self._shown: list[int] = []
        """Inodes."""
        self._orders, self._say = orders, say
        self._late = asyncio.get_running_loop().call_later(MOST_SECONDS, self.kill)
        self._taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(orders, self._readable)

    def _readable(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._orders.recv(1024)
        if data.startswith(FAILED):
            self.failed = data.removeprefix(FAILED).decode(errors="replace")
            return
        if data.startswith(UNREHEARSED):
            self._say(data.decode(errors="replace"))
            return
        if data == SLOTS:
            self.registered = True
            return
        if data == READY:
            self.was_ready = True
            self._late.cancel()
        if data != READY and not self._taken.done():
            self._taken.set_result(data == TAKEN)
        if not data:
            self.close()

    def show(self, slots: Sequence[int]) -> None:
        """These are the slots of its rank, all of them: it maps and registers them ahead of its round,
        and gives back what else it has."""
        inodes = [os.fstat(fd).st_ino for fd in slots]
        if not self.ready or inodes == self._shown:
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", slots))]
        try:
            self._orders.sendmsg([SLOTS], rights if slots else [], socket.MSG_NOSIGNAL)
        except OSError:
            return  # it is busy, and shown them at the next look; or gone
        self._shown, self.registered = inodes, False

    async def order(self, spec: StartSpec, fds: Mapping[str, int]) -> None:
        """Make it the rank of `spec`. Raises OSError if it is gone; one whose device is being given
        back after a SIGKILL takes no orders, though it looks alive."""
        try:
            self._send(spec, fds)
            async with asyncio.timeout(PATIENCE):
                if not await self._taken:
                    raise ConnectionResetError(errno.ECONNRESET, "the spare rank is gone")
        except OSError:
            self.kill()
            raise
        finally:
            self.close()

    def _send(self, spec: StartSpec, fds: Mapping[str, int]) -> None:
        fd = descriptors.memory_file(spec.to_json())
        try:
            rights = array.array("i", (fd, *fds.values()))
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            self._orders.sendmsg([",".join(fds).encode()], control, socket.MSG_NOSIGNAL)
        finally:
            os.close(fd)

    @property
    def ready(self) -> bool:
        """It waits for its orders."""
        return self.was_ready and self._orders.fileno() >= 0

    def kill(self) -> None:
        """Whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def give_up(self) -> None:
        """It ends, with its memory; one that is not ready would hear of it only when it is."""
        self.close()
        if not self.was_ready:
            self.kill()

    def close(self) -> None:
        """Give it up, unless it has its orders."""
        self._late.cancel()
        if self._orders.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._orders)
            self._orders.close()


class Spares:
    """The spares of this node, by local rank."""

    def __init__(self, settings: AgentSettings, starters: Starters) -> None:
        self._settings = settings
        self._starters = starters
        self._gpus = Gpus(settings.workload.environ.get("CUDA_VISIBLE_DEVICES"))
        self._spares: dict[int, Spare] = {}
        self._taken: set[Spare] = set()
        """That live on as ranks, or are about to."""
        self._used: dict[int, tuple[int, int]] = {}
        """Device and most bytes that each local rank was seen to hold there."""
        self._seen: dict[int, ModulesNote] = {}
        """What each local rank's script had made of its environment by its first step, and spares are to rehearse."""
        self._unready, self._rehearse = 0, True
        self._said: set[str] = set()
        """Why spares did not rehearse."""
        self._wanted = settings.spare_ranks and settings.rank_start != "spawn"

    @property
    def pids(self) -> set[int]:
        """Those that were taken too: a sweep of the ranks before looks while one gets its orders."""
        return {spare.pid for spare in (*self._spares.values(), *self._taken)}

    def note(self, local_rank: int, given: Mapping[str, str], seen: ModulesNote) -> None:
        """A rank has finished its first step: what CUDA and NCCL read of the environment is known."""
        if "CUDA_VISIBLE_DEVICES" in changes(given, seen.environ):
            self._wanted = False
            log.info("no spare ranks: the script chooses its devices by CUDA_VISIBLE_DEVICES")
        self._seen[local_rank] = seen

    async def look(self, running: Callable[[], Mapping[int, int]]) -> None:
        """Note what the ranks hold; fork spares that lack, give up surplus.

        Called now and then while ranks train. running: those of this round that run (local rank to pid); once
        they are others than at first, nothing is forked: the driver would serve it beside the next round's ranks.
        """
        if not self._wanted or not self._gpus.works:
            return
        pids = dict(running())
        held = await self._gpus.used_by(pids.values())
        for local_rank, pid in pids.items():
            if pid in held:
                device, size = held[pid]
                self._used[local_rank] = (device, max(size, self._used.get(local_rank, (0, 0))[1]))
        free = await self._gpus.free()
        for local_rank, (device, _) in self._used.items():
            if running() != pids:
                return
            if local_rank in pids and device < len(free):
                await self._match(local_rank, device, free[device])

    def show(self, slots: Mapping[int, Sequence[int]]) -> None:
        """What each local rank has of slots; to be said soon after one is dropped, since a spare keeps
        its memory until then."""
        for local_rank, spare in self._spares.items():
            spare.show(slots.get(local_rank, ())[:MOST_FDS])

    async def _match(self, local_rank: int, device: int, free: int) -> None:
        spare = self._spares.get(local_rank)
        if spare is not None and free < SHORT:
            if spare.rehearses and not spare.was_ready:
                spare.kill()  # which may be what takes it: the next one does not rehearse
                return
            log.warning("device %d is short of memory: its spare rank is given up", device)
            self._spares.pop(local_rank).give_up()
            self._wanted = False
        elif spare is None and free > NEEDS and self._starters.standby_ready.is_set():
            await self.fork(local_rank, f"cuda:{device}")

    async def fork(self, local_rank: int, device: str) -> None:
        """Fork a spare for `local_rank` that holds `device` (cuda:0, ..., or cpu)."""
        work = self._settings.workload
        seen = self._seen.get(local_rank, ModulesNote(modules=(), environ=dict(work.environ)))
        environ = seen.environ | {env.MARK: mark(self._settings, 0)}
        if self._settings.virtual_local_rank:
            device = "cuda:0" if device != "cpu" else device
        spec = StartSpec(
            kind="spare", target=device, args=seen.rehearsal if self._rehearse else (), environ=environ,
            cwd=work.cwd, python=work.python,
        )  # fmt: skip
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            log.info("no spare rank: %s", error)
            return
        ours.setblocking(False)
        with theirs:
            try:
                pid = await self._starters.fork(spec, {"orders": theirs.fileno()})
                spare = Spare(pid, ours, rehearses=bool(spec.args), say=self._unrehearsed)
            except (StartFailed, StarterDied, OSError) as error:
                ours.close()  # whoever waits at the other end is given up by it
                log.info("no spare rank: %s", error)
                return
        if not self._wanted:  # since it was asked for
            spare.give_up()
            return
        self._spares[local_rank] = spare
        spare.ended.add_done_callback(lambda _: self._ended(local_rank, spare))

    def _unrehearsed(self, why: str) -> None:
        kind = ":".join(why.split(":")[:2])  # a message may have numbers
        if kind not in self._said:
            self._said.add(kind)
            log.info("a spare rank has %s", why)

    def _ended(self, local_rank: int, spare: Spare) -> None:
        spare.close()
        self._taken.discard(spare)
        if self._spares.get(local_rank) is not spare:
            return
        del self._spares[local_rank]
        if spare.failed:
            log.info("no spare ranks: %s", spare.failed)
            self._wanted = False
        elif (
            not spare.was_ready and spare.rehearses
        ):  # what it rehearses may end it, and would again
            if self._rehearse:
                log.warning(
                    "spare ranks rehearse no more: one ended, or took too long, before it was ready"
                )
            self._rehearse = False
        else:
            log.info("the spare of local rank %d ended before it was taken", local_rank)
            self._unready += not spare.was_ready  # so may what it warms up
            if self._unready == MOST_UNREADY and self._wanted:
                log.warning(
                    "no spare ranks any more: %d ended before they were ready", MOST_UNREADY
                )
                self._wanted = False

    def take(self, local_rank: int) -> Spare | None:
        """The spare of `local_rank`, if it is ready; it is the caller's from now on."""
        spare = self._spares.get(local_rank)
        if spare is None or not spare.ready or spare.ended.done():
            return None
        self._taken.add(spare)
        return self._spares.pop(local_rank)

    def complete(self, local_ranks: int) -> bool:
        """Every local rank has a spare that is ready."""
        return local_ranks > 0 and all(
            (s := self._spares.get(local)) is not None and s.ready for local in range(local_ranks)
        )

    def judge(self, started_by: str, exit_code: int) -> None:
        """A rank ended before its round's first step. Where a spare became it, that may be why: from now on there
        is none, and the next restart is slower and surer. What was killed says nothing of it."""
        innocent = (0, -signal.SIGKILL, -signal.SIGTERM)
        if started_by != "spare" or exit_code in innocent or not self._wanted:
            return
        log.warning(
            "no spare ranks any more: one became a rank and ended with exit code %d before a step",
            exit_code,
        )
        self._wanted = False
        for spare in self._spares.values():
            spare.give_up()
        self._spares.clear()

    async def room(self) -> None:
        """Return once every device has as much free memory as the rank before used there."""
        while self._gpus.works:
            free = await self._gpus.free()
            used = self._used.values()
            if all(device < len(free) and free[device] > size for device, size in used):
                return
            await asyncio.sleep(LOOK)
        await asyncio.Event().wait()  # nobody can say: whoever asked waits for the reaping instead

    def kill(self) -> None:
        """For good; who sweeps reaps them."""
        self._wanted = False  # nor does one that is being forked stay
        for spare in self._spares.values():
            spare.kill()
        self._spares.clear()  # their ends say nothing any more
        self._gpus.close()

"""Who starts a rank: the spawner always, the standby once it is built from what the script did."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

from elastic.agent.environment import common_environment, mark
from elastic.agent.settings import AgentSettings
from elastic.agent.starters.kept import Kept
from elastic.agent.starters.spec import OBEYED_AT_START, StartSpec
from elastic.agent.starters.starter import Starter, StartFailed, Unfit
from elastic.proto import env
from elastic.proto.errors import StarterDied

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds after the first `import torch` until a standby is built, if no step is finished before."""

START_TIMEOUT = 30.0
"""Seconds that a starter gets to start a process, before it is ended and another asked."""

READ_BY_TORCH = ("OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_")
"""Beginnings of the names of variables that torch, or what it brings, reads when it is imported."""

_OF_A_RANK = env.OF_TORCHRUN | {
    "CUDA_VISIBLE_DEVICES",
    env.PAGE_FD,
    env.LINK_FD,
    env.MARK,
    env.JOB,
    env.LAUNCH,
    env.ROUND,
}


def changes(given: Mapping[str, str], seen: Mapping[str, str]) -> dict[str, str | None]:
    """What a script did to its environment; None: it took the name out."""
    changed: dict[str, str | None] = {
        key: value for key, value in seen.items() if given.get(key) != value
    }
    return changed | {key: None for key in given if key not in seen}


def _never(settings: AgentSettings) -> str:
    """Why no rank of this workload is ever forked."""
    if settings.rank_start == "spawn":
        return "--rank-start spawn"
    return "a program is executed" if settings.workload.kind == "program" else ""


class Starters:
    """Keeps a spawner and, where that is safe, a standby; starts each again when it dies."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._spawner: Starter | None = None
        self._standby = Kept(
            "standby",
            self._launch_standby,
            self._spawn_from_now_on,
            self._preload,
            awaited=settings.rank_start == "fork",
        )
        self._nursery = Kept("nursery", self._launch_nursery, self._spawn_stores)
        """In the standby's place where no rank is forked: stores are."""
        self._notes: dict[int, Mapping[str, str | None]] = {}
        """What each local rank had changed in its environment before it imported torch."""
        self.reason = _never(settings)
        """Why ranks are not forked; empty while they may be."""
        self._at_once = settings.rank_start == "fork" and not self.reason
        """They are from the first, so that none imports torch."""
        self.plain = self._at_once
        """Every local rank has imported torch, and had changed nothing."""
        self._environ: dict[str, str] | None = None
        self._modules: tuple[str, ...] = ()
        self._modules_known = asyncio.Event()
        self._turn = asyncio.Lock()
        self._over = False
        self._ahead = False
        """The standby was built before any rank ran here."""
        self._under_way = 0
        self.idle = asyncio.Event()
        """No start was asked for that is not answered."""
        self.idle.set()
        self.standby_ready = self._standby.ready
        self.nursery_ready = self._nursery.ready
        self.threads: int | None = None
        """Intra-op threads that the script asks for before it imports torch."""

    @property
    def prepared(self) -> bool:
        """Ranks here start as fast as they ever will."""
        return self.standby_ready.is_set() or bool(self.reason)

    @property
    def pids(self) -> set[int]:
        return {s.pid for s in self._all() if not s.died.is_set()}

    def _all(self) -> list[Starter]:
        all_ = (self._spawner, self._standby.starter, self._nursery.starter)
        return [starter for starter in all_ if starter is not None]

    @property
    def forks_stores(self) -> bool:
        """A store is a matter of milliseconds now."""
        return self._standby.usable is not None or self._nursery.usable is not None

    async def start(self, spec: StartSpec, fds: Mapping[str, int]) -> tuple[str, int]:
        """Start a process; returns who did and its pid. Raises StartFailed."""
        fork = True
        for _ in range(5):
            forker = await self._forker(spec) if fork else None
            starter = forker or await self._ensure_spawner()
            try:
                return starter.kind, await self._ask(starter, spec, fds)
            except StarterDied:
                continue
            except StartFailed as error:
                if starter is not forker:
                    raise
                fork = False
                if isinstance(error, Unfit):
                    self._spawn_from_now_on(str(error))
                else:
                    log.warning("spawned this once: %s", error)
        raise StartFailed("the process that starts ranks died five times in a row")

    async def fork(self, spec: StartSpec, fds: Mapping[str, int]) -> int:
        """Fork a process from the standby, or not at all. Raises StartFailed or StarterDied."""
        standby = self._standby.usable
        if standby is None or standby.busy:
            raise StartFailed("there is no standby that could be forked now")
        return await self._ask(standby, spec, fds)

    async def _ask(self, starter: Starter, spec: StartSpec, fds: Mapping[str, int]) -> int:
        with self._starting():
            try:
                async with asyncio.timeout(START_TIMEOUT):
                    return await starter.start(spec, fds)
            except TimeoutError:
                log.warning("the %s does not answer and is ended", starter.kind)
                await starter.end(self._settings.kill_timeout)
                raise StarterDied(f"the {starter.kind} did not answer") from None

    def _spawn_from_now_on(self, reason: str) -> None:
        if self.reason:
            return
        self.reason = reason
        self._standby.end()
        log.warning("ranks are spawned, not forked: %s", reason)
        asyncio.get_running_loop().call_later(PATIENCE, self.build)

    async def settled(self) -> None:
        """Wait until no start is under way."""
        while self._under_way:
            await self.idle.wait()

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        self._under_way += 1
        self.idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.idle.set()

    async def _forker(self, spec: StartSpec) -> Starter | None:
        if not self.reason:
            return await self._standby.wanted()
        return await self._nursery.wanted() if spec.kind == "store" else None

    async def _ensure_spawner(self) -> Starter:
        async with self._turn:
            if self._over:
                raise StartFailed("this node is ending")
            if self._spawner is None or self._spawner.died.is_set():
                self._spawner = await Starter.launch(
                    "spawner", environ=self._own_environ(), cwd=self._settings.workload.cwd
                )
            return self._spawner

    def _own_environ(self) -> dict[str, str]:
        return dict(self._settings.workload.environ) | {env.MARK: mark(self._settings, 0)}

    # --- what the script does, and the standby made from it ---------------------------------

    def note_torch(
        self, local_rank: int, local_ranks: int, given: Mapping[str, str], seen: Mapping[str, str]
    ) -> None:
        """A rank is about to import torch, with `seen` made of the environment it was given."""
        changed = changes(given, seen)
        self._notes[local_rank] = {
            key: value
            for key, value in changed.items()
            if key not in _OF_A_RANK and not key.startswith(OBEYED_AT_START)
        }
        notes = [self._notes[local] for local in range(local_ranks) if local in self._notes]
        if len(notes) < local_ranks:
            return
        self.plain = not any(notes)
        if self.reason:
            asyncio.get_running_loop().call_later(PATIENCE, self.build)
            return
        if self._ahead and not self.plain:
            self._spawn_from_now_on(
                "on this node the script changes what torch reads when it is imported"
            )
        if self._environ is not None:
            return
        if any(note != notes[0] for note in notes):
            self._spawn_from_now_on("ranks set different environments before they import torch")
            return
        base = {key: value for key, value in given.items() if key not in _OF_A_RANK}
        base |= {key: value for key, value in self._notes[0].items() if value is not None}
        threads = self._notes[0].get("OMP_NUM_THREADS") or ""
        self.threads = int(threads) if threads.isdecimal() and int(threads) > 0 else None
        self._environ = {k: v for k, v in base.items() if self._notes[0].get(k, "") is not None}
        asyncio.get_running_loop().call_later(PATIENCE, self.build)

    def note_modules(self, modules: tuple[str, ...]) -> None:
        """A rank has finished its first step, with these modules imported."""
        if not self._modules_known.is_set():
            self._modules = modules
            self._modules_known.set()
        self.build()

    def prepare(self) -> None:
        """Build a standby for a script that no rank has run here yet: ranks of other nodes are known
        to import torch in the environment that they are given.
        """
        if self._environ is None and not self.reason:
            given = common_environment(self._settings)
            self._environ = {key: given[key] for key in given if key not in _OF_A_RANK}
            self._ahead = True
            self.build()

    async def forkable(self) -> None:
        """Where ranks are forked from the first, wait for the standby."""
        if self._at_once:
            await self._standby.wanted()

    def note_environment(self, given: Mapping[str, str], seen: Mapping[str, str]) -> None:
        """A rank has finished its first step, with `seen` made of the environment it was given."""
        late = sorted(name for name in changes(given, seen) if name.startswith(READ_BY_TORCH))
        if late and self._at_once and self.plain and not self.reason:
            self.plain = False
            log.warning(
                "%s: set by the script, and too late: --rank-start fork imports torch before it, and auto would not",
                ", ".join(late),
            )

    def build(self) -> None:
        """Build the standby now, in the background, if it is known how; or what takes its place."""
        if self.reason:
            self._nursery.begin()
        elif self._environ is not None:
            self._standby.begin()

    async def _launch_nursery(self) -> Starter:
        return await Starter.launch(
            "nursery",
            environ=self._own_environ(),
            cwd=self._settings.workload.cwd,
            python=self._settings.workload.python,
        )

    def _spawn_stores(self, reason: str) -> None:
        log.warning("stores are spawned, not forked: %s", reason)

    async def _launch_standby(self) -> Starter:
        return await Starter.launch(
            "standby",
            environ=(self._environ or {}) | {env.MARK: mark(self._settings, 0)},
            cwd=self._settings.workload.cwd,
            python=self._settings.workload.python,
        )

    async def _preload(self, standby: Starter) -> None:
        await self._modules_known.wait()
        done = await standby.preload(self._modules)
        log.info("the standby has %d modules preloaded", len(done.loaded))
        for module, reason in done.refused.items():
            log.info("the standby does not preload %s: %s", module, reason)

    def kill(self) -> None:
        """For good; who sweeps reaps them."""
        self._over = True
        self._standby.end()
        self._nursery.end()
        if self._spawner is not None:
            self._spawner.kill()

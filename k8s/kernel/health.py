"""What a kubelet and Prometheus ask: `/healthz`, `/readyz`, `/metrics`.

Alive: the event loop turns, and each cache has heard something lately. Ready: each cache has had its
first list. A process that waits for the lease is both.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

LAG = 30.0
"""Seconds that the loop may be behind before the process counts as stuck."""
SILENT = 300.0
"""Seconds without a word from the server before a cache counts as stuck; bookmarks come each minute,
and a watch is begun anew after 70 s without."""
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What is asked of a reflector."""

    synced: Callable[[], bool]
    heard: Callable[[], float]
    """When it heard something last, by the loop's clock."""


@dataclass(slots=True)
class Durations:
    """A histogram, in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.total += seconds
        place = next((n for n, most in enumerate(BUCKETS) if seconds <= most), len(BUCKETS))
        self.counts[place] += 1

    def lines(self, name: str) -> Iterable[str]:
        yield f"# TYPE {name} histogram"
        seen = 0
        for most, count in zip((*BUCKETS, "+Inf"), self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{le="{most}"}} {seen}'
        yield f"{name}_sum {self.total:.6f}"
        yield f"{name}_count {seen}"


class Health:
    """What a process tells of itself; it has no socket before `serve`."""

    def __init__(self, prefix: str) -> None:
        """prefix: of the metrics, such as elasticjob_operator."""
        self._prefix = prefix
        self._caches: dict[str, Cache] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self.reconciles = {"success": 0, "error": 0}
        self.durations = Durations()
        self.lag = 0.0
        """Seconds that the loop was late at its last beat."""
        self._beat: float | None = None

    def watch_cache(self, name: str, cache: Cache) -> None:
        """Ask this cache, too; name: the kind of its objects."""
        self._caches[name] = cache

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Tell this number, too, as it is when asked."""
        self._gauges[name] = value

    def reconciled(self, seconds: float, *, failed: bool) -> None:
        self.durations.add(seconds)
        self.reconciles["error" if failed else "success"] += 1

    def trouble(self, now: float) -> str:
        """Why this process should be started again; empty: it should not."""
        late = now - self._beat - 1.0 if self._beat is not None else 0.0
        if late > LAG:
            return f"the event loop has not turned for {late:.0f} s"
        for name, cache in self._caches.items():
            if cache.synced() and now - cache.heard() > SILENT:
                return f"nothing was heard of {name} for {now - cache.heard():.0f} s"
        return ""

    def waiting(self) -> str:
        """What it still waits for before it can work; empty: it works."""
        missing = [name for name, cache in self._caches.items() if not cache.synced()]
        return f"not listed yet: {', '.join(missing)}" if missing else ""

    def metrics(self, now: float) -> str:
        """As Prometheus reads them."""
        name = self._prefix
        lines = [f"# TYPE {name}_reconcile_total counter"]
        lines += [
            f'{name}_reconcile_total{{result="{result}"}} {count}'
            for result, count in self.reconciles.items()
        ]
        lines += self.durations.lines(f"{name}_reconcile_duration_seconds")
        lines.append(f"# TYPE {name}_watch_last_event_age_seconds gauge")
        lines += [
            f'{name}_watch_last_event_age_seconds{{kind="{kind}"}} {now - cache.heard():.3f}'
            for kind, cache in self._caches.items()
            if cache.synced()
        ]
        gauges: Mapping[str, float] = {"loop_lag_seconds": self.lag} | {
            gauge: value() for gauge, value in self._gauges.items()
        }
        for gauge, number in gauges.items():
            lines += [f"# TYPE {name}_{gauge} gauge", f"{name}_{gauge} {number:g}"]
        return "\n".join(lines) + "\n"

    @asynccontextmanager
    async def serve(self, host: str, port: int) -> AsyncIterator[int]:
        """Answer on that address for the length of a `with`; yields the port (port 0: any)."""
        web = importlib.import_module("aiohttp.web")
        application = web.Application()
        application.router.add_get("/healthz", self._answer(web, self._healthz))
        application.router.add_get("/readyz", self._answer(web, self._readyz))
        application.router.add_get("/metrics", self._answer(web, self._metrics))
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        beating = asyncio.create_task(self._keep_beating())
        try:
            await web.TCPSite(runner, host, port).start()
            yield runner.addresses[0][1]
        finally:
            beating.cancel()
            await runner.cleanup()

    async def _keep_beating(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._beat = loop.time()
            await asyncio.sleep(1.0)
            self.lag = max(0.0, loop.time() - self._beat - 1.0)

    def _answer(self, web: Any, what: Callable[[float], tuple[int, str]]) -> Any:
        async def handle(request: Any) -> Any:
            status, text = what(asyncio.get_running_loop().time())
            return web.Response(status=status, text=text)

        return handle

    def _healthz(self, now: float) -> tuple[int, str]:
        trouble = self.trouble(now)
        return (500, f"{trouble}\n") if trouble else (200, "ok\n")

    def _readyz(self, now: float) -> tuple[int, str]:
        waiting = self.waiting()
        return (503, f"{waiting}\n") if waiting else (200, "ok\n")

    def _metrics(self, now: float) -> tuple[int, str]:
        return 200, self.metrics(now)

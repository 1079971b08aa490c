"""One holder at a time: a Lease object that its holder renews, and that others take once it is not.

The holder stops by its own clock, 10 s after it sent the last renewal that was accepted; nobody else
takes over before the lease has been seen unchanged for 15 s. So a holder that is cut off, or was
stopped and goes on, has ended before its successor begins: `held()` is asked before each write that
takes something away.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.errors import Absent, ApiError, Conflict, LeaseLost
from elastic.k8s.kernel.resources import LEASES

log = logging.getLogger(__name__)

DURATION, RENEW, RETRY = 15.0, 10.0, 2.0
"""Seconds: until others may take it; until the holder gives up; between two tries."""


def clock() -> float:
    """Seconds that also count while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """One contender for one lease."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration: float = DURATION,
        renew: float = RENEW,
        retry: float = RETRY,
        now: Callable[[], float] = clock,
    ) -> None:
        """identity: unlike every other contender's, also of the same pod before a restart."""
        if not retry < renew < duration:
            raise ValueError("a lease needs retry < renew < duration")
        self._api, self._namespace, self._name, self._identity = api, namespace, name, identity
        self._duration, self._renew, self._retry, self._now = duration, renew, retry, now
        self._until = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)  # a version of another's lease, and since when
        self.holder = ""
        """Who held it when it was last read."""

    def held(self) -> bool:
        """Whether it is ours at this moment, whatever the server thinks."""
        return self._now() < self._until

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Wait for the lease, then `lead` while it is ours; release it when that ends or this is
        cancelled. Raises LeaseLost when it is lost, once `lead` has been cancelled and has ended."""
        while not await self.attempt():
            await asyncio.sleep(self._pause())
        log.info("%s is held by %s: this process leads", self._name, self._identity)
        leading = asyncio.ensure_future(lead())
        keeping = asyncio.ensure_future(self._keep())
        try:
            await asyncio.wait((leading, keeping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(leading)
            await _end(keeping)
            await self._release()
        for task in (leading, keeping):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _keep(self) -> None:
        """Renew until it is lost."""
        while True:
            await asyncio.sleep(min(self._pause(), max(0.0, self._until - self._now())))
            if not await self.attempt() and not self.held():
                raise LeaseLost(
                    f"lease {self._namespace}/{self._name} is lost: "
                    + (
                        f"{self.holder} has it"
                        if self.holder not in ("", self._identity)
                        else f"it could not be renewed for {self._renew:g} s"
                    )
                )

    def _pause(self) -> float:
        return self._retry * random.uniform(1.0, 1.2)

    async def attempt(self) -> bool:
        """One try to take or to renew it; whether it is ours by the server's answer."""
        sent = self._now()
        try:
            async with asyncio.timeout(self._renew - self._retry if self.held() else self._renew):
                return await self._take(sent)
        except Conflict:
            return False  # another wrote it meanwhile: the next try reads who
        except (ApiError, TimeoutError) as error:
            log.warning("lease %s: %s", self._name, str(error) or "no answer in time")
            return False

    async def _take(self, sent: float) -> bool:
        try:
            found = await self._api.call(
                "GET",
                LEASES.path(self._namespace, self._name),
                timeout=self._renew / 2,
                urgent=True,
            )
        except Absent:
            await self._write(None)
        else:
            spec = found.get("spec") or {}
            self.holder = spec.get("holderIdentity") or ""
            if self.holder not in ("", self._identity):
                self._until = float("-inf")
                if not self._is_over(found, sent):
                    return False
            await self._write(found)
        self.holder = self._identity
        self._until = sent + self._renew
        return True

    def _is_over(self, found: Json, now: float) -> bool:
        """Whether another's lease has not changed for as long as it lasts: by our own clock, since
        those of two machines differ."""
        version = found["metadata"]["resourceVersion"]
        if self._seen[0] != version:
            self._seen = version, now
        lasts = float((found.get("spec") or {}).get("leaseDurationSeconds") or self._duration)
        return now - self._seen[1] >= lasts

    async def _write(self, found: Json | None) -> None:
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old = (found or {}).get("spec") or {}
        ours = old.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._duration)),
            "acquireTime": old.get("acquireTime") or moment if ours else moment,
            "renewTime": moment,
            "leaseTransitions": int(old.get("leaseTransitions") or 0) + (not ours and bool(found)),
        }
        await self._put(found, spec)

    async def _put(self, found: Json | None, spec: Json) -> None:
        metadata: Json = {"name": self._name, "namespace": self._namespace}
        method, path = "POST", LEASES.path(self._namespace)
        if found is not None:
            metadata = found["metadata"]
            method, path = "PUT", LEASES.path(self._namespace, self._name)
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": spec,
        }
        await self._api.call(method, path, body=body, timeout=self._renew / 2, urgent=True)

    async def _release(self) -> None:
        """Let the next one have it at once; best effort, and only if it is still ours."""
        if not self.held():
            return
        self._until = float("-inf")
        path = LEASES.path(self._namespace, self._name)
        try:
            async with asyncio.timeout(self._retry):
                found = await self._api.call("GET", path, timeout=self._retry, urgent=True)
                spec = found.get("spec") or {}
                if spec.get("holderIdentity") == self._identity:
                    spec |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                    await self._put(found, spec)
        except (ApiError, TimeoutError) as error:
            log.info("lease %s is left to run out: %s", self._name, error)


async def _end(task: "asyncio.Future[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task

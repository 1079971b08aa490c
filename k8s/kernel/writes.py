"""Writes that may be repeated: retried with pauses, refused once the lease is not held, and remembered
until the cache shows them.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TypeVar

from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.errors import (
    Absent,
    AlreadyExists,
    ApiError,
    Broken,
    Busy,
    Conflict,
    Fenced,
    Invalid,
    Unreachable,
)
from elastic.k8s.kernel.resources import Resource

log = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)

PATIENCE = 30.0
"""Seconds for a write with all its repetitions; then its key comes again with the queue's pauses."""
FIRST, MOST = 0.05, 5.0
"""Seconds before a write is repeated: the first time, and at most."""
EXPECTED = 30.0
"""Seconds after which a write that the cache still does not show is not waited for."""
TOGETHER = 16
"""Calls at once of one batch."""


class Expectations:
    """What was written and the cache does not show yet, by whose it is (a job's uid, say).

    An owner with something pending is not reconciled: what the cache shows of it is older than what
    was done. Creations are known by namespace and name before they are sent, and by uid once they are
    answered; deletions by uid. `see` hears of every change of the cache.
    """

    def __init__(self) -> None:
        self._creating: dict[tuple[str, str], tuple[Hashable, float]] = {}
        self._deleting: dict[str, tuple[Hashable, float]] = {}

    def creating(self, owner: Hashable, namespace: str, name: str, now: float) -> None:
        self._creating[namespace, name] = owner, now + EXPECTED

    def waits(self, namespace: str, name: str) -> bool:
        """For the cache to show what is being created under that name."""
        return (namespace, name) in self._creating

    def not_created(self, namespace: str, name: str) -> None:
        """The server refused it: nothing will come."""
        self._creating.pop((namespace, name), None)

    def deleting(self, owner: Hashable, uid: str, now: float) -> None:
        self._deleting[uid] = owner, now + EXPECTED

    def not_deleting(self, uid: str) -> None:
        """The server refused, or there was nothing to delete."""
        self._deleting.pop(uid, None)

    def see(self, namespace: str, name: str, uid: str, *, leaving: bool) -> None:
        """The cache shows this object; leaving: terminating, or gone."""
        self._creating.pop((namespace, name), None)
        if leaving:
            self._deleting.pop(uid, None)

    def pending(self, owner: Hashable, now: float) -> int:
        """How many writes for `owner` the cache does not show yet; those that it should have shown
        long ago are given up: names that do not repeat still keep anything from being made twice."""
        return _pending(self._creating, owner, now) + _pending(self._deleting, owner, now)


class Writer:
    """Writes as one field manager, while `held` says so."""

    def __init__(
        self,
        api: Api,
        *,
        manager: str,
        held: Callable[[], bool] = lambda: True,
        expectations: Expectations | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._api, self._manager, self._held = api, manager, held
        self.expectations = expectations or Expectations()
        self._patience = patience

    async def create(self, owner: Hashable, resource: Resource, body: Json) -> Json:
        """Create an object under its fixed name. Where a try was not answered and the next one finds
        the name taken, it is ours if it has the controller that `body` names; another's is left
        alone, and AlreadyExists raised. Nor is it tried again once the cache has shown it: Absent is
        raised where it is gone by then."""
        namespace, name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
        self.expectations.creating(owner, namespace, name, _now())

        async def attempt() -> Json:
            if not self.expectations.waits(namespace, name):
                raise AlreadyExists(f"{name} was made, and not answered", status=409)
            return await self._api.create(resource, namespace, body)

        try:
            return await self._persist(attempt)
        except AlreadyExists:
            self.expectations.not_created(namespace, name)
            if (found := await self.find(resource, body)) is None:
                raise
            return found
        except (Unreachable, Broken):
            raise  # it may be there: the cache will tell, or the expectation ends
        except BaseException:
            self.expectations.not_created(namespace, name)
            raise

    async def find(self, resource: Resource, body: Json) -> Json | None:
        """What has the name of `body` and its controller; None: another's. Raises Absent."""
        namespace, name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
        found = await self._persist(lambda: self._api.get(resource, namespace, name))
        ours = _controller(found) is not None and _controller(found) == _controller(body)
        return found if ours else None

    async def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Json,
        *,
        subresource: str = "",
        again_on_conflict: bool = True,
    ) -> Json:
        """Server-side apply, by force: other managers keep the fields that `body` does not have. again_on_conflict:
        not where `body` has the uid of an object that may be gone."""
        return await self._persist(
            lambda: self._api.apply(
                resource, namespace, name, body, manager=self._manager, subresource=subresource
            ),
            again_on_conflict=again_on_conflict,
        )

    async def apply_status(
        self, resource: Resource, namespace: str, name: str, uid: str, status: Json
    ) -> Json:
        """This manager's part of a status; uid: of that object alone, Conflict where the name is
        another's by now."""
        body = {"metadata": {"uid": uid}, "status": status}
        try:
            return await self.apply(resource, namespace, name, body, subresource="status")
        except Invalid as error:  # some kinds call another uid an illegal edit
            fields = {cause.get("field") for cause in error.details.get("causes") or ()}
            if fields != {"metadata.uid"}:
                raise
            raise Conflict(str(error), status=error.status, reason=error.reason) from error

    async def delete(
        self,
        owner: Hashable,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str,
        *,
        grace: int | None = None,
        propagation: str = "Background",
    ) -> None:
        """Delete that very object; gone already, or another by now under its name, is as good."""
        self.expectations.deleting(owner, uid, _now())
        try:
            await self._persist(
                lambda: self._api.delete(
                    resource, namespace, name, uid=uid, grace=grace, propagation=propagation
                ),
                again_on_conflict=False,
            )
        except (Absent, Conflict):
            self.expectations.not_deleting(uid)
        except (Unreachable, Broken):
            raise
        except BaseException:
            self.expectations.not_deleting(uid)
            raise

    async def _persist(
        self, call: Callable[[], Awaitable[R]], *, again_on_conflict: bool = True
    ) -> R:
        """Call until it is answered for good; the fence is asked before every try."""
        until, pause = _now() + self._patience, FIRST
        while True:
            if not self._held():
                raise Fenced("this process may not write now: another may serve in its place")
            try:
                return await call()
            except (Busy, Broken, Unreachable, Conflict) as error:
                if isinstance(error, AlreadyExists):
                    raise
                if isinstance(error, Conflict) and not again_on_conflict:
                    raise
                wait = max(pause * random.uniform(0.5, 1.0), error.retry_after or 0.0)
                if _now() + wait > until:
                    raise
                log.info("again in %.2g s: %s", wait, error)
                await asyncio.sleep(wait)
                pause = min(2 * pause, MOST)


async def together(
    items: Sequence[T], call: Callable[[T], Awaitable[object]]
) -> tuple[int, ApiError | None]:
    """Call for each of `items`: one, then two at once, four, ... (TOGETHER at most), and no further
    after a batch with a failure, since a quota that refuses one refuses the next thousand. Returns how
    many succeeded and the first error."""
    done, batch, rest = 0, 1, list(items)
    while rest:
        now, rest = rest[:batch], rest[batch:]
        answers = await asyncio.gather(*(call(item) for item in now), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        done += len(now) - len(failures)
        for failure in failures:
            if not isinstance(failure, ApiError):
                raise failure
        if failures:
            first = failures[0]
            assert isinstance(first, ApiError)
            return done, first
        batch = min(2 * batch, TOGETHER)
    return done, None


def _pending(table: dict[Key, tuple[Hashable, float]], owner: Hashable, now: float) -> int:
    count = 0
    for key, (whose, until) in list(table.items()):
        if until <= now:
            log.warning("the cache never showed what was written for %s: %s", whose, key)
            del table[key]
        elif whose == owner:
            count += 1
    return count


def _controller(item: Json) -> str | None:
    for owner in item["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return None


def _now() -> float:
    return asyncio.get_running_loop().time()

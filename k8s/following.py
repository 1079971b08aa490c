"""Waiting for what an ElasticJob becomes, and saying meanwhile what happens."""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.resources import ELASTICJOBS
from elastic.proto.errors import NotFound
from elastic.proto.verbs import Output

Until = Callable[[Json], bool]

WIDTHS = (8, 10, 7, 10, 0)
STEPS = 10.0
"""Seconds between two lines that say nothing but a later step."""


def is_true(item: Json, condition: str) -> bool:
    """Whether a condition is True, said of the spec as it is now."""
    status = item.get("status") or {}
    if int(status.get("observedGeneration") or 0) < int(item["metadata"].get("generation") or 0):
        return False
    return any(
        one.get("type") == condition and one.get("status") == "True"
        for one in status.get("conditions") or ()
    )


def begun(item: Json) -> bool:
    """It trains."""
    return is_true(item, "Training")


def over(item: Json) -> bool:
    """It is complete, or has failed."""
    return is_true(item, "Complete") or is_true(item, "Failed")


async def follow(
    api: Api,
    item: Json,
    out: Output,
    args: argparse.Namespace,
    *,
    until: Until,
    silently: bool = False,
) -> int:
    """Until that is so, or the job is over; exit code 1 for a job that failed, or whose edit the
    operator refuses. Raises TimeoutError after args.timeout."""
    name = item["metadata"]["name"]
    try:
        async with asyncio.timeout(args.timeout):
            last = await _watch(api, item, out, until, silently=silently)
    except asyncio.CancelledError:
        out.note(
            f"detached: {name} goes on as it is. `elasticctl ls {name} --follow` looks again, "
            f"`elasticctl delete {name}` ends it"
        )
        raise
    if (refused := _refused(last)) and not until(last):
        out.note(refused)
        return 1
    if is_true(last, "Failed"):
        out.note(f"{name} failed: {_words(last)}")
        return 1
    return 0


async def gone(api: Api, item: Json, timeout: float | None) -> None:
    """Until that very object is no more. Raises TimeoutError."""
    async with asyncio.timeout(timeout), _states(api, item) as states:
        async for state in states:
            if state is None:
                return


async def _watch(api: Api, item: Json, out: Output, until: Until, *, silently: bool) -> Json:
    shown, when = None, 0.0
    async with _states(api, item) as states:
        async for state in states:
            if state is None:
                break
            line, now = _line(state), time.monotonic()
            quiet = silently or out.form in ("json", "yaml", "name")
            if not quiet and (_but_step(line) != _but_step(shown) or now - when > STEPS):
                out.row((time.strftime("%H:%M:%S"), *line), WIDTHS)
                shown, when = line, now
            if until(state) or over(state) or _refused(state):
                return state
    raise NotFound(f"{item['metadata']['name']} was deleted")


@contextlib.asynccontextmanager
async def _states(api: Api, item: Json) -> AsyncIterator[AsyncIterator[Json | None]]:
    """The object each time that it changes, and None once it is gone."""
    metadata = item["metadata"]
    fields = f"metadata.name={metadata['name']}"
    # A first answer says at once that this may not be listed; the cache below would try for ever.
    await api.page(ELASTICJOBS, metadata["namespace"], fields=fields)
    changes: asyncio.Queue[Json | None] = asyncio.Queue()

    def changed(old: Json | None, new: Json | None) -> None:
        changes.put_nowait(new if new and new["metadata"]["uid"] == metadata["uid"] else None)

    cache: Reflector[Json] = Reflector(
        api,
        ELASTICJOBS,
        project=lambda found: found,
        changed=changed,
        namespace=metadata["namespace"],
        fields=fields,
    )

    async def states() -> AsyncIterator[Json | None]:
        await cache.synced.wait()
        if not len(cache):
            yield None
        while True:
            yield await changes.get()

    keeping = asyncio.create_task(cache.run())
    try:
        yield states()
    finally:
        keeping.cancel()


def _refused(item: Json) -> str:
    """The operator's words for a spec that it does not take."""
    status = item.get("status") or {}
    for one in status.get("conditions") or ():
        current = int(one.get("observedGeneration") or status.get("observedGeneration") or 0)
        if (one.get("type"), one.get("status")) == ("Accepted", "False") and current >= int(
            item["metadata"].get("generation") or 0
        ):
            return str(one.get("message") or one.get("reason") or "the operator refuses it")
    return ""


def _line(item: Json) -> tuple[str, ...]:
    status = item.get("status") or {}
    ready, desired = status.get("readyReplicas") or 0, status.get("desiredReplicas") or 0
    step = ((status.get("job") or {}).get("training") or {}).get("step")
    return (
        str(status.get("phase") or "Pending"),
        f"{ready}/{desired}",
        f"step {step}" if step else "-",
        _words(item),
    )


def _but_step(line: tuple[str, ...] | None) -> object:
    return line and (line[0], line[1], line[3])


def _words(item: Json) -> str:
    status = item.get("status") or {}
    told = [status.get("reason"), status.get("message")]
    return " ".join(": ".join(str(one) for one in told if one).split())

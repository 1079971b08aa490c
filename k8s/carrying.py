"""Does to one job what `reconcile` says, while the lease is ours: what is written, made and taken away, and the events."""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic.k8s import belongings, pods
from elastic.k8s.jobs import Answers, Job
from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.errors import (
    Absent,
    AlreadyExists,
    ApiError,
    Broken,
    Conflict,
    Fenced,
    Forbidden,
    Invalid,
    Unreachable,
)
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.kernel.resources import EVENTS, PODS, SECRETS, Resource
from elastic.k8s.kernel.writes import Writer, together
from elastic.k8s.observed import Member
from elastic.k8s.reconcile import Plan
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.status import Event, Told, is_quota
from elastic.proto import elasticjob, schema

log = logging.getLogger(__name__)

REFUSALS = (Absent, AlreadyExists, Forbidden, Invalid)
"""Of what a job needs: they stay, until somebody does something about them."""
SHOWN = 120.0
"""Seconds after which a status that was written and the cache does not show is not waited for: a watch that is silent
is begun anew long before."""
REMEMBERED = 4096
"""Events and answers that are not asked for again."""


class Carrier:
    """For all jobs of an operator."""

    def __init__(self, api: Api, lease: Lease) -> None:
        self._api, self._lease = api, lease
        self._writer = Writer(api, manager=elasticjob.OPERATOR, held=lease.held)
        self.expectations = self._writer.expectations
        self.answers: dict[str, Answers] = {}
        """By uid, of the spec that is looked at: for the next look."""
        self._written: dict[str, tuple[int, float]] = {}
        """By uid: the version of the job's last status of ours, and until when the cache is waited for. What is older
        names a master that was followed by another since."""
        self._told: OrderedDict[str, None] = OrderedDict()
        self._events: asyncio.Queue[tuple[pods.Owner, Event]] = asyncio.Queue(REMEMBERED)

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self.answers.pop(uid, None)
        self._written.pop(uid, None)

    def is_stale(self, seen: Job, moment: float) -> bool:
        version, until = self._written.get(seen.owner.uid, (0, 0.0))
        return moment < until and int(seen.version) < version

    async def asked(self, body: Json) -> str:
        """The server's words against a pod; empty: it would take it."""
        try:
            await self._api.create(PODS, body["metadata"]["namespace"], body, dry_run=True)
        except (Invalid, Forbidden) as error:
            return "" if is_quota(str(error)) else str(error)
        except AlreadyExists:  # that is found out last: all else was taken
            return ""
        return ""

    async def prepare(self, seen: Job, plan: Plan) -> ApiError | None:
        """What comes before anything is written down; the server's refusal of what the job needs."""
        owner = seen.owner
        if plan.finalizers is not None:
            await self._finalize(seen, plan.finalizers)
        have = [self._have(resource, body) for resource, body in plan.belongings]
        if plan.token:
            have.append(
                self._have(SECRETS, belongings.token(owner, secrets.token_urlsafe(32)), again=False)
            )
        have += [self._remove(resource, body) for resource, body in plan.superfluous]
        refused: list[ApiError] = []
        for answer in await asyncio.gather(*have, return_exceptions=True):  # none goes on behind
            if isinstance(answer, REFUSALS):
                refused.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
        names = {body["metadata"]["name"] for _, body in plan.belongings}
        lasting = [one for one in refused if not _lags(one, names)]
        if refused and not lasting:
            raise refused[0]
        return next(iter(lasting), None)

    async def carry_out(self, seen: Job, plan: Plan, answers: Answers) -> None:
        owner = seen.owner
        if plan.told is not None:
            await self._tell(seen, plan.told)
        if plan.note is not None:
            await self._leave_note(owner, plan.note)
        for event in plan.events:  # no later look has them
            with contextlib.suppress(asyncio.QueueFull):
                self._events.put_nowait((owner, event))
        if plan.master is not None:
            await self._begin(owner, plan.master, answers)
        _, error = await together(plan.delete, lambda one: self._take(owner, one))
        if error is not None:
            raise error
        if plan.delete_job:
            self._fence()
            with contextlib.suppress(Absent, Conflict):
                await self._api.delete(ELASTICJOBS, owner.namespace, owner.name, uid=owner.uid)

    async def _finalize(self, seen: Job, finalizers: tuple[str, ...]) -> None:
        """Of that version alone: they are one list, that others write, too."""
        body = {"metadata": {"finalizers": list(finalizers), "resourceVersion": seen.version}}
        self._fence()
        with contextlib.suppress(Absent):
            await self._api.merge(ELASTICJOBS, seen.owner.namespace, seen.owner.name, body)

    async def _have(self, resource: Resource, body: Json, *, again: bool = True) -> None:
        """It is there, and as `body` says; not again: as it was made at first. Another's of that name is not touched."""
        meta = body["metadata"]
        self._fence()
        try:
            await self._api.create(resource, meta["namespace"], body)
        except AlreadyExists:
            if (found := await self._writer.find(resource, body)) is None:
                raise
            if again:
                wanted = {**body, "metadata": {**meta, "uid": found["metadata"]["uid"]}}
                await self._writer.apply(
                    resource, meta["namespace"], meta["name"], wanted, again_on_conflict=False
                )
        except Absent as error:
            if error.details:
                raise
            raise Absent(f"no {resource.kind} of {resource.api_version} is known here") from error

    async def _remove(self, resource: Resource, body: Json) -> None:
        """It is not there; another's of that name stays. What we may not even look for we have not made."""
        meta = body["metadata"]
        self._fence()
        with contextlib.suppress(Absent, Conflict, Forbidden):
            if (found := await self._writer.find(resource, body)) is not None:
                uid = found["metadata"]["uid"]
                await self._api.delete(resource, meta["namespace"], meta["name"], uid=uid)

    def _fence(self) -> None:
        if not self._lease.held():
            raise Fenced("the lease is not held")

    async def _tell(self, seen: Job, told: Told) -> None:
        owner = seen.owner
        with contextlib.suppress(Absent):
            found = await self._writer.apply_status(
                ELASTICJOBS, owner.namespace, owner.name, owner.uid, schema.dump(told)
            )
            until = asyncio.get_running_loop().time() + SHOWN
            self._written[owner.uid] = int(found["metadata"]["resourceVersion"]), until

    async def _leave_note(self, owner: pods.Owner, note: Mapping[str, Any]) -> None:
        """By a patch: what is applied would take away what is not said again."""
        self._fence()
        body = {"metadata": {"uid": owner.uid}, "status": note}
        with contextlib.suppress(Absent, Conflict):
            await self._api.merge(
                ELASTICJOBS, owner.namespace, owner.name, body, subresource="status"
            )

    async def _begin(self, owner: pods.Owner, body: Json, answers: Answers) -> None:
        """The master's pod; why there is none is said in the job's status."""
        try:
            await self._writer.create(owner.uid, PODS, body)
        except AlreadyExists:
            self.answers[owner.uid] = replace(answers, template=None, taken=True)
            raise
        except (Unreachable, Broken, Absent):
            raise  # it may be there, or was: nobody has refused it, and its name is not to come twice
        except ApiError as error:
            self.answers[owner.uid] = Answers(master=str(error))
            raise

    async def _take(self, owner: pods.Owner, one: Member) -> None:
        await self._writer.delete(owner.uid, PODS, one.namespace, one.name, one.uid)

    async def note_all(self) -> None:
        """After what matters more."""
        while True:
            await self._note(*await self._events.get())

    async def _note(self, owner: pods.Owner, event: Event) -> None:
        """Best effort, and each once."""
        text = f"{owner.uid}|{event.reason}|{event.note}|{event.at}"
        name = f"{owner.name}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if name in self._told:
            return
        self._told[name] = None
        if len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        try:
            await self._api.create(EVENTS, owner.namespace, _event(owner, name, event))
        except AlreadyExists:
            pass
        except ApiError as error:
            log.warning("an event cannot be written: %s", error)


def _lags(error: ApiError, names: set[str]) -> bool:
    """The server does not see yet what is made beside it: a binding's role."""
    return isinstance(error, Absent) and error.details.get("name") in names


def _event(owner: pods.Owner, name: str, event: Event) -> Json:
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": name, "namespace": owner.namespace},
        "eventTime": event.at.replace("Z", ".000000Z"),
        "regarding": {
            "apiVersion": ELASTICJOBS.api_version, "kind": ELASTICJOBS.kind,
            "namespace": owner.namespace, "name": owner.name, "uid": owner.uid,
        },
        "reportingController": elasticjob.OPERATOR,
        "reportingInstance": elasticjob.OPERATOR,
        "action": "Reconcile",
        "reason": event.reason,
        "note": event.note[:1000],
        "type": "Warning" if event.warns else "Normal",
    }  # fmt: skip

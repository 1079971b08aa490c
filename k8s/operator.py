"""`elasticctl operator`: keeps every ElasticJob of its namespaces as `reconcile` says. One of several replicas works,
the holder of a Lease; what it does rests on what it lists alone.
"""

import argparse
import asyncio
import contextlib
import hashlib
import logging
import os
import random
import secrets
import signal
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.k8s import belongings, pods
from elastic.k8s.jobs import Answers, Job, job
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
    LeaseLost,
    NoCluster,
    Unreachable,
)
from elastic.k8s.kernel.health import Cache, Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.kernel.pacing import Pace
from elastic.k8s.kernel.queue import Queue
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import BUDGETS, EVENTS, PODS, SECRETS, Resource
from elastic.k8s.kernel.writes import Writer, together
from elastic.k8s.masters import heard
from elastic.k8s.observed import Member, member
from elastic.k8s.reconcile import Plan, reconcile
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.status import Event, Told, is_quota
from elastic.k8s.tainter import Tainter
from elastic.proto import elasticjob, schema
from elastic.proto.verbs import Context, said

log = logging.getLogger(__name__)

LEASE = "elasticjob-operator"
RESYNC = 600.0
"""Seconds after which everything that belongs to a job is looked after again, whoever took it away."""
QPS, BURST = 100.0, 200
REFUSALS = (Absent, AlreadyExists, Forbidden, Invalid)
"""Of what a job needs: they stay, until somebody does something about them."""
SHOWN = 120.0
"""Seconds after which a status that was written and the cache does not show is not waited for: a watch that is silent
is begun anew long before."""
REMEMBERED = 4096
"""Events and answers that are not asked for again."""

Key = tuple[str, str]


class Operator:
    """namespaces: whose jobs; ("",): of all. taint: also nodes whose hardware failed one of them."""

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str],
        lease: Lease,
        health: Health,
        *,
        taint: bool = False,
    ) -> None:
        self._api, self._lease, self._health = api, lease, health
        self._queue: Queue[Key] = Queue()
        self._writer = Writer(api, manager=elasticjob.OPERATOR, held=lease.held)
        self._uids: dict[str, Key] = {}
        self._answers: dict[str, Answers] = {}
        """By uid, of the spec that is looked at."""
        self._completed: dict[str, float] = {}
        self._written: dict[str, tuple[int, float]] = {}
        """By uid: the version of the job's last status of ours, and until when the cache is waited for. What is older
        names a master that was followed by another since."""
        self._told: OrderedDict[str, None] = OrderedDict()
        self._events: asyncio.Queue[tuple[pods.Owner, Event]] = asyncio.Queue(REMEMBERED)
        self._budgets = BUDGETS.version
        selector = elasticjob.UID_LABEL
        self._jobs = {
            one: self._watch(ELASTICJOBS, one, job, self._job_changed) for one in namespaces
        }
        self._pods = {
            one: self._watch(PODS, one, member, self._pod_changed, selector=selector, by_job=True)
            for one in namespaces
        }
        self._tainter = Tainter(api, self._jobs.values(), lease.held) if taint else None
        health.gauge("leader", lambda: float(lease.held()))
        health.gauge("queue_length", lambda: float(len(self._queue)))

    def _watch(
        self,
        resource: Resource,
        namespace: str,
        project: Callable[[Json], Any],
        changed: Callable[[Any, Any], None],
        *,
        selector: str = "",
        by_job: bool = False,
    ) -> Reflector[Any]:
        cache: Reflector[Any] = Reflector(
            self._api,
            resource,
            project=project,
            changed=changed,
            indexers={"job": lambda one: (one.job,)} if by_job else None,
            namespace=namespace,
            selector=selector,
        )
        name = f"{resource.plural}/{namespace}" if namespace else resource.plural
        self._health.watch_cache(name, Cache(synced=cache.synced.is_set, heard=lambda: cache.heard))
        return cache

    async def run(self) -> None:
        """Watch, and work while the lease is ours; raises LeaseLost."""
        caches = [*self._jobs.values(), *self._pods.values()]
        watching = [asyncio.ensure_future(cache.run()) for cache in caches]
        leading = asyncio.ensure_future(self._lease.run(self._lead))
        try:
            done, _ = await asyncio.wait({leading, *watching}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (leading, *watching):
                task.cancel()
            await asyncio.gather(leading, *watching, return_exceptions=True)

    async def _lead(self) -> None:
        for cache in (*self._jobs.values(), *self._pods.values()):
            await cache.synced.wait()
        self._budgets = await self._served()
        for cache in self._jobs.values():
            for one in cache:
                self._job_changed(None, one)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._note_all())
            if self._tainter is not None:
                group.create_task(self._tainter.run())
            group.create_task(self._queue.run(self._look))

    async def _served(self) -> str:
        """The version of policy: v1 came with 1.21, when v1beta1 was on its way out."""
        try:
            found = await self._api.call("GET", "/apis/policy")
        except ApiError:
            return BUDGETS.version
        return str(found.get("preferredVersion", {}).get("version") or BUDGETS.version)

    # --- what is seen ----------------------------------------------------------------------------

    def _job_changed(self, old: Job | None, new: Job | None) -> None:
        for one in (old, new):
            if one is not None:
                key = one.owner.namespace, one.owner.name
                self._uids[one.owner.uid] = key
                self._queue.add(key)
        if old is not None and new is None:
            for table in (self._uids, self._answers, self._completed, self._written):
                table.pop(old.owner.uid, None)

    def _pod_changed(self, old: Member | None, new: Member | None) -> None:
        one = new or old
        assert one is not None
        leaving = new is None or new.deleting
        self._writer.expectations.see(one.namespace, one.name, one.uid, leaving=leaving)
        if (key := self._uids.get(one.job)) is not None:
            self._queue.add(key)

    def _cache(self, namespace: str) -> tuple[Reflector[Any], Reflector[Any]]:
        place = namespace if namespace in self._jobs else ""
        return self._jobs[place], self._pods[place]

    # --- one job ---------------------------------------------------------------------------------

    async def _look(self, key: Key) -> float | None:
        begun, failed = time.monotonic(), True
        try:
            again = await self._reconcile(key)
            failed = False
        except Fenced:
            again, failed = 1.0, False
        finally:
            self._health.reconciled(time.monotonic() - begun, failed=failed)
        return again

    async def _reconcile(self, key: Key) -> float | None:
        jobs, members = self._cache(key[0])
        seen: Job | None = jobs.get(*key)
        if seen is None:
            return None
        uid = seen.owner.uid
        moment = asyncio.get_running_loop().time()
        if self._writer.expectations.pending(uid, moment) or self._is_stale(seen, moment):
            return 1.0
        now = time.time()
        last = self._completed.setdefault(uid, now - random.random() * RESYNC)
        complete = now - last >= RESYNC
        answers = self._answers.pop(uid, Answers())
        found = members.by("job", uid)
        if not heard(seen, found) and (newest := await self._newest(seen)) is not None:
            seen = newest
        decide = partial(reconcile, seen, found, now=now, complete=complete, budgets=self._budgets)
        plan = decide(answers=answers)
        trouble: ApiError | None = None
        if plan.ask is not None:
            try:
                answers = replace(answers, template=await self._asked(plan.ask))
            except Broken as error:
                answers, trouble = replace(answers, unasked=str(error)), error
            plan = decide(answers=answers)
        if (refused := await self._prepare(seen, plan)) is not None:
            plan, trouble = decide(answers=replace(answers, lacks=str(refused))), refused
        await self._carry_out(seen, plan, answers)
        if trouble is not None:  # which is said by now: again after a pause
            raise trouble
        if complete:
            self._completed[uid] = now
        return RESYNC if plan.again is None else min(plan.again, RESYNC)

    async def _newest(self, seen: Job) -> Job | None:
        """As the server has it, whatever the cache shows."""
        with contextlib.suppress(Absent):
            raw = await self._api.get(ELASTICJOBS, seen.owner.namespace, seen.owner.name)
            found = job(raw)
            return found if found.owner == seen.owner else None
        return None

    def _is_stale(self, seen: Job, moment: float) -> bool:
        version, until = self._written.get(seen.owner.uid, (0, 0.0))
        return moment < until and int(seen.version) < version

    async def _asked(self, body: Json) -> str:
        """The server's words against a pod; empty: it would take it."""
        try:
            await self._api.create(PODS, body["metadata"]["namespace"], body, dry_run=True)
        except (Invalid, Forbidden) as error:
            return "" if is_quota(str(error)) else str(error)
        except AlreadyExists:  # that is found out last: all else was taken
            return ""
        return ""

    async def _prepare(self, seen: Job, plan: Plan) -> ApiError | None:
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

    async def _carry_out(self, seen: Job, plan: Plan, answers: Answers) -> None:
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
                await self._writer.apply(resource, meta["namespace"], meta["name"], wanted)
        except Absent as error:
            if error.details:
                raise
            raise Absent(f"no {resource.kind} of {resource.api_version} is known here") from error

    async def _remove(self, resource: Resource, body: Json) -> None:
        """It is not there; another's of that name stays."""
        meta = body["metadata"]
        self._fence()
        with contextlib.suppress(Absent, Conflict):
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
            self._answers[owner.uid] = replace(answers, template=None, taken=True)
            raise
        except (Unreachable, Broken):
            raise  # it may be there: nobody has refused it
        except ApiError as error:
            self._answers[owner.uid] = Answers(master=str(error))
            raise

    async def _take(self, owner: pods.Owner, one: Member) -> None:
        await self._writer.delete(owner.uid, PODS, one.namespace, one.name, one.uid)

    async def _note_all(self) -> None:
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


# --- the program ---------------------------------------------------------------------------------


def operator(context: Context, argv: Sequence[str]) -> int:
    """Look after the ElasticJobs of a cluster: what its Deployment runs."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="elasticctl operator: %(message)s")
    try:
        asyncio.run(_run(args))
    except LeaseLost as error:
        context.out.note(f"{error}: its pod starts it anew")
        return 1
    except (NoCluster, Forbidden) as error:
        context.out.note(str(error))
        return 1
    except OSError as error:
        where = f"{args.health_address}:{args.health_port}"
        context.out.note(
            f"cannot listen on {where}: {error.strerror or error}; choose another --health-port"
        )
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="elasticctl operator", description=operator.__doc__)
    parser.add_argument(
        "-n", "--namespace", action="append", default=[], type=said, metavar="NAME",
        help="look after the jobs of this namespace; may be given several times; default: its own",
    )  # fmt: skip
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="of all; it needs a ClusterRole then"
    )
    parser.add_argument(
        "--lease-namespace", type=said, metavar="NAME", help="of the Lease; default: its own"
    )
    parser.add_argument(
        "--health-address", default="127.0.0.1", metavar="IP",
        help="where /healthz, /readyz and /metrics are; in a pod its own address (default: 127.0.0.1)",
    )  # fmt: skip
    parser.add_argument("--health-port", type=_port, default=8080, metavar="PORT")
    parser.add_argument(
        "--allow-node-taint", action="store_true",
        help="taint nodes whose hardware failed a job, for as long as the job avoids them; it needs a ClusterRole then",
    )  # fmt: skip
    parser.add_argument(
        "--kubeconfig", type=said, metavar="FILE", help="default: as kubectl finds it"
    )
    parser.add_argument("--context", type=said, metavar="NAME", help="of the kubeconfig")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: write 0 to 65535")
    return int(text)


async def _run(args: argparse.Namespace) -> None:
    async with await Api.connect(
        kubeconfig=args.kubeconfig,
        context=args.context,
        pace=Pace(QPS, BURST),
        agent=elasticjob.OPERATOR,
    ) as api:
        namespaces = ("",) if args.all_namespaces else tuple(args.namespace or [api.namespace])
        identity = f"{os.uname().nodename}_{uuid.uuid4().hex[:12]}"
        lease = Lease(api, args.lease_namespace or api.namespace, LEASE, identity)
        health = Health("elasticjob_operator")
        spaces = tuple(dict.fromkeys(namespaces))
        working = Operator(api, spaces, lease, health, taint=args.allow_node_taint)
        async with health.serve(args.health_address, args.health_port) as port:
            log.info(
                "health on %s:%d; jobs of %s",
                args.health_address,
                port,
                ", ".join(namespaces) or "all",
            )
            await _until_told(asyncio.ensure_future(working.run()))


async def _until_told(work: "asyncio.Future[None]") -> None:
    """SIGTERM and SIGINT end it in peace: the lease is let go."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work

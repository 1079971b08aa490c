"""`elasticctl operator`: keeps every ElasticJob of its namespaces as `reconcile` says. One of several replicas works,
the holder of a Lease; what it does rests on what it lists alone.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.k8s.carrying import Carrier
from elastic.k8s.jobs import Answers, Job, job
from elastic.k8s.kernel.api import Api, Json
from elastic.k8s.kernel.errors import (
    Absent,
    ApiError,
    Broken,
    Fenced,
    Forbidden,
    LeaseLost,
    NoCluster,
)
from elastic.k8s.kernel.health import Cache, Health
from elastic.k8s.kernel.lease import Lease
from elastic.k8s.kernel.pacing import Pace
from elastic.k8s.kernel.queue import Queue
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import BUDGETS, PODS, QUOTAS, Resource
from elastic.k8s.masters import heard
from elastic.k8s.observed import Member, member
from elastic.k8s.reconcile import reconcile
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.tainter import Tainter
from elastic.proto import elasticjob
from elastic.proto.verbs import Context, said

log = logging.getLogger(__name__)

LEASE = "elasticjob-operator"
RESYNC = 600.0
"""Seconds after which everything that belongs to a job is looked after again, whoever took it away."""
ROOM = 1.0
"""Seconds between two jobs that are looked at because a quota, which had refused them something, has changed: each pod
that comes or goes changes it."""
QPS, BURST = 100.0, 200
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
        self._carrier = Carrier(api, lease)
        self._uids: dict[str, Key] = {}
        self._completed: dict[str, float] = {}
        self._budgets = BUDGETS.version
        selector = elasticjob.UID_LABEL
        self._jobs = {
            one: self._watch(ELASTICJOBS, one, job, self._job_changed) for one in namespaces
        }
        self._pods = {
            one: self._watch(PODS, one, member, self._pod_changed, selector=selector, by_job=True)
            for one in namespaces
        }
        self._quotas: list[Reflector[Any]] = [
            Reflector(
                api,
                QUOTAS,
                project=lambda raw: (raw["metadata"]["namespace"], raw.get("status")),
                changed=self._quota_changed,
                namespace=one,
            )
            for one in namespaces
        ]
        self._tainter = Tainter(api, self._jobs.values(), lease.held) if taint else None
        health.gauge("leader", lambda: float(lease.held()))
        health.gauge("workqueue_depth", lambda: float(len(self._queue)))

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
        caches = [*self._jobs.values(), *self._pods.values(), *self._quotas]
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
            group.create_task(self._carrier.note_all())
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
            self._uids.pop(old.owner.uid, None)
            self._completed.pop(old.owner.uid, None)
            self._carrier.forget(old.owner.uid)

    def _pod_changed(self, old: Member | None, new: Member | None) -> None:
        one = new or old
        assert one is not None
        leaving = new is None or new.deleting
        self._carrier.expectations.see(one.namespace, one.name, one.uid, leaving=leaving)
        if (key := self._uids.get(one.job)) is not None:
            self._queue.add(key)

    def _quota_changed(self, old: tuple[str, Any] | None, new: tuple[str, Any] | None) -> None:
        """There may be room: whoever waits for that, waits no longer."""
        namespace, _ = new or old or ("", None)
        mine = (one for one in self._cache(namespace)[0] if one.owner.namespace == namespace)
        refused = (one for one in mine if one.told.refused_by_a_quota)
        for place, one in enumerate(refused, 1):
            self._queue.add_after((namespace, one.owner.name), place * ROOM)

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
        if self._carrier.expectations.pending(uid, moment) or self._carrier.is_stale(seen, moment):
            return 1.0
        now = time.time()
        last = self._completed.setdefault(uid, now - random.random() * RESYNC)
        complete = now - last >= RESYNC
        answers = self._carrier.answers.pop(uid, Answers())
        found = members.by("job", uid)
        if not heard(seen, found) and (newest := await self._newest(seen)) is not None:
            seen = newest
        decide = partial(reconcile, seen, found, now=now, complete=complete, budgets=self._budgets)
        plan = decide(answers=answers)
        trouble: ApiError | None = None
        if plan.ask is not None:
            try:
                answers = replace(answers, template=await self._carrier.asked(plan.ask))
            except Broken as error:
                answers, trouble = replace(answers, unasked=str(error)), error
            plan = decide(answers=answers)
        if (refused := await self._carrier.prepare(seen, plan)) is not None:
            plan, trouble = decide(answers=replace(answers, lacks=str(refused))), refused
        await self._carrier.carry_out(seen, plan, answers)
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

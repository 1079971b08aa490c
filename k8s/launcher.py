"""The master's launcher on Kubernetes: makes, replaces and takes back worker pods (`master/launcher.py`).

Each turn starts from what the cache shows: `supply.plan` says what is to be done, and it is done. What
the master is told is a level, too: a node whose pod is over or gone is removed, whoever noticed first.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from elastic.k8s import causes, placing, recalling, supply
from elastic.k8s.causes import Action, Cause, Verdict
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.errors import AlreadyExists, Forbidden, Invalid
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.resources import PODS, QUOTAS
from elastic.k8s.kernel.writes import Writer, together
from elastic.k8s.observed import Pod, pod
from elastic.k8s.placing import Limits
from elastic.k8s.recalling import Recalled
from elastic.k8s.status import is_quota
from elastic.k8s.supply import New, Plan, Seen, Wanted
from elastic.proto.elasticjob import PodFailure, Remembered
from elastic.proto.ending import from_json

log = logging.getLogger(__name__)

Json = dict[str, Any]

LOOK = 1.0
"""Seconds after which it looks again, whatever it was told."""
SILENT = 3.0
"""Seconds for which a pod whose agent the master has no more may still end by itself."""
LONGEST_PAUSE = 60.0
"""Seconds, at most, until creation is tried again where it was refused."""
ROOM = 2.0
"""Seconds until it is where the quota that refused has changed since: each pod that comes or goes changes it."""


class Told(Protocol):
    """What it knows of a master, and may tell it: the shell's side, in words of this module."""

    def nodes(self) -> frozenset[str]: ...
    def attached(self) -> frozenset[str]: ...
    def slow(self) -> frozenset[str]: ...
    def unfit(self) -> dict[str, str]:
        """Who is kept out since its machine is at fault, and what it is."""

    def known(self) -> frozenset[str]:
        """Every name of a node that the journal still has."""

    def step(self) -> int: ...
    def over(self) -> bool: ...
    def removed(self, gone: list[tuple[str, Verdict]]) -> None: ...
    def withdrawn(self, leave: tuple[tuple[str, str], ...]) -> None: ...
    def replaced(self, leave: tuple[tuple[str, str], ...]) -> None:
        """These are to leave as ones whose check has failed."""

    def resized(self, least: int, most: int, wanted: Wanted) -> None: ...
    def failed(self, cause: str, reason: str) -> None: ...
    def restart(self, reason: str) -> None: ...


class Supplier:
    """Worker pods of one job. make: the manifest of a new pod, that keeps away from these nodes."""

    def __init__(
        self,
        api: Api,
        writer: Writer,
        *,
        namespace: str,
        job: str,
        uid: str,
        label: str,
        wanted: Wanted,
        limits: Limits,
        make: Callable[[New, tuple[str, ...]], Json],
        known: Recalled | None = None,
    ) -> None:
        """label: the name of the one that has the job's uid. known: of the launcher before."""
        self.wanted = wanted
        """May be another at any time; `wake` after that."""
        self.limits = limits
        self.said: Plan | None = None
        """The last one; None: no pods are wanted."""
        self.makes = True
        """Pods that are missing are made."""
        self._known = known or Recalled()
        self.failures = self._known.failures
        """The last ones, oldest first."""
        self.placing = self._known.placing
        self.refused = ""
        """Why no pod could be made, in the server's words."""
        self._writer, self._namespace, self._job, self._uid = writer, namespace, job, uid
        self._make = make
        self._memory: supply.Memory | None = None
        self._ends: dict[str, Pod] = {}
        """By name: pods that have ended since the last look, as they were shown then."""
        self._answered: dict[str, float] = {}
        """By name: when the server said that it has made a pod; of those that no watch has shown."""
        self._missing: dict[str, float] = {}
        """Since when, by name, an agent that was there is no more."""
        self._ever: set[str] = set()
        """Names of pods whose agent was there."""
        self._verdicts: dict[str, Verdict] = {}
        self._denied = False
        """By the server's rules, not for want of an answer."""
        self._pause, self._not_before = 0.0, 0.0
        self._stirred = asyncio.Event()
        self._pods: Reflector[Pod | None] = Reflector(
            api,
            PODS,
            project=self._read,
            changed=self._changed,
            namespace=namespace,
            selector=f"{label}={uid}",
        )
        self._quota = asyncio.Event()
        """One has refused pods: they are watched from then on."""
        self._quotas: Reflector[Any] = Reflector(
            api,
            QUOTAS,
            project=lambda raw: raw.get("status"),
            changed=self._quota_changed,
            namespace=namespace,
        )
        self._name = re.compile(rf"{re.escape(job)}-worker-(\d+)-r(\d+)")

    # --- the cluster -----------------------------------------------------------------------------

    def _read(self, raw: Json) -> Pod | None:
        """None: it only has our label; a job's pods have it as their controller, and names by slot."""
        meta = raw["metadata"]
        owners = [o.get("uid") for o in meta.get("ownerReferences") or () if o.get("controller")]
        found = self._name.fullmatch(meta["name"])
        if owners != [self._uid] or found is None:
            return None
        return pod(raw, int(found[1]), int(found[2]))

    @property
    def pods(self) -> tuple[Pod, ...]:
        return tuple(found for found in self._pods if found is not None)

    def _changed(self, old: Pod | None, new: Pod | None) -> None:
        if (one := new or old) is not None:
            leaving = new is None or new.deleting
            self._writer.expectations.see(self._namespace, one.name, one.uid, leaving=leaving)
            if new is None or not new.alive:
                self._ends.setdefault(one.name, one)
        self._stirred.set()

    def _quota_changed(self, old: object, new: object) -> None:
        if is_quota(self.refused):
            self._not_before = min(self._not_before, time.time() + ROOM)

    @property
    def remembered(self) -> Remembered:
        """For the launcher after this one."""
        now: supply.Memory | Recalled = self._memory or self._known
        return recalling.remembered(now.pasts, now.step, self.placing)

    def wake(self) -> None:
        self._stirred.set()

    async def watch(self) -> None:
        """Keep the caches, until cancelled."""
        await asyncio.gather(self._pods.run(), self._watch_quotas())

    async def _watch_quotas(self) -> None:
        await self._quota.wait()
        await self._quotas.run()

    async def running(self) -> frozenset[str]:
        """Names of pods that run."""
        await self._pods.synced.wait()
        return frozenset(p.name for p in self.pods if p.alive and p.phase == "Running")

    async def run(self, told: Told, changed: Callable[[float], Any]) -> None:
        """Give the job its pods, until it has a result."""
        await self._pods.synced.wait()
        if self._memory is None:
            attempts = self._attempts(told.known())
            self._memory = recalling.memory(self._known, self.pods, attempts, self.wanted.rules)
            self._ever |= told.known()
            self._ends.clear()
        while not told.over():
            self._stirred.clear()
            pause = await self._turn(told)
            await self._rest(changed, pause)

    async def _rest(self, changed: Callable[[float], Any], pause: float) -> None:
        waits = {
            asyncio.ensure_future(self._stirred.wait()),
            asyncio.ensure_future(changed(pause)),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED, timeout=pause)
        finally:
            for task in waits:
                task.cancel()

    def _attempts(self, names: frozenset[str]) -> dict[int, int]:
        found: dict[int, int] = {}
        for name in names:
            if (parts := self._name.fullmatch(name)) is not None:
                slot, attempt = int(parts[1]), int(parts[2])
                found[slot] = max(found.get(slot, 0), attempt + 1)
        return found

    # --- a turn ----------------------------------------------------------------------------------

    async def _turn(self, told: Told) -> float:
        """Returns the seconds until the next one, if nothing happens."""
        assert self._memory is not None
        now = time.time()
        here = {found.name: found for found in self.pods}
        ended, self._ends = tuple(self._ends.values()), {}
        self._answered = {n: at for n, at in self._answered.items() if n in self._memory.made}
        seen = Seen(
            pods=tuple(here.values()),
            ended=ended,
            missed=frozenset(n for n, at in self._answered.items() if at < self._pods.listed),
            attached=told.attached(),
            lost=self._lost(told, here, now),
            slow=told.slow(),
            step=told.step(),
            refused=self.refused if self._denied else "",
        )
        plan = supply.plan(self.wanted, seen, self._memory, now, lambda new: new.pod(self._job))
        if plan.ended or plan.memory.closed is not self._memory.closed:
            self._pause, self._not_before = 0.0, 0.0  # there may be room again
        self._memory, self.said = plan.memory, plan
        self._learn(plan, now)
        self._tell(told, plan, here, now)
        await self._delete(plan.delete, here)
        if self.makes and now >= self._not_before:
            await self._create(plan, now)
        else:
            self._memory = supply.refused(self._memory, plan.create)
        until = min(plan.until or now + LOOK, now + LOOK)
        return max(0.05, until - now)

    def _lost(self, told: Told, here: dict[str, Pod], now: float) -> frozenset[str]:
        """The master has given their agent up, and their pod does not end by itself."""
        self._ever |= told.attached()
        self._ever &= here.keys() | told.nodes()
        gone = {n for n in self._ever - told.nodes() if n in here and here[n].alive}
        self._missing = {n: self._missing.get(n, now) for n in gone}
        return frozenset(n for n, since in self._missing.items() if now >= since + SILENT)

    def _learn(self, plan: Plan, now: float) -> None:
        for ended, verdict in plan.ended:
            log.warning("%s: %s", verdict.reason, verdict.action)
            self._verdicts[ended.name], reason = verdict, causes.short(verdict.reason)
            if verdict.cause is not Cause.COMPLETED:
                one = PodFailure(
                    time=now,
                    pod=ended.name,
                    node=ended.node,
                    rank=None if (words := from_json(ended.last_words)) is None else words.rank,
                    exit_code=ended.exit_code,
                    cause=str(verdict.cause),
                    action=str(verdict.action),
                    reason=reason,
                )
                self.failures = recalling.failures((*self.failures, one))
            if verdict.action is Action.REPLACE_ELSEWHERE:
                cause, sure = str(verdict.cause), verdict.proof
                self.placing = placing.blame(
                    self.placing, ended.node, cause, reason, now, self.limits, sure=sure
                )
        self.placing = placing.expire(self.placing, now, self.limits)

    def _tell(self, told: Told, plan: Plan, here: dict[str, Pod], now: float) -> None:
        assert self._memory is not None
        usual = Verdict(
            cause=Cause.DELETED, action=Action.REPLACE, counts=False, reason="its pod is gone"
        )
        gone = [
            (name, self._verdicts.get(name, usual))
            for name in sorted(told.nodes() & self._ever)
            if name not in self._memory.made and (name not in here or here[name].over)
        ]
        gone += supply.taken_away(plan, told.nodes())
        if gone:
            told.removed(gone)
        self._verdicts = {n: v for n, v in self._verdicts.items() if n in told.nodes() or n in here}
        if plan.fail is not None:
            told.failed(*plan.fail)
            return
        told.resized(self.wanted.least, max(plan.size, self.wanted.least), self.wanted)
        leave = tuple((name, why) for name, why in plan.withdraw if name in told.nodes())
        if leave:
            told.withdrawn(leave)
        self._replace(told, here, now)
        if plan.restart:
            told.restart(plan.restart)

    def _replace(self, told: Told, here: dict[str, Pod], now: float) -> None:
        """Pods whose machine is at fault end as such, and others come, elsewhere."""
        unfit = told.unfit()
        on = {name: here[name].node for name in unfit if name in here and here[name].alive}
        self.placing, leave = placing.leave(
            self.placing, on, self.wanted.replicas, now, self.limits
        )
        if leave:
            told.replaced(tuple((name, f"its check failed: {unfit[name]}") for name in leave))

    async def _create(self, plan: Plan, now: float) -> None:
        avoid = placing.nodes(self.placing, self.wanted.replicas, now, self.limits)
        done: set[New] = set()
        taken: set[New] = set()

        async def one(new: New) -> None:
            try:
                await self._writer.create(self._uid, PODS, self._make(new, avoid))
            except AlreadyExists:  # somebody else's
                taken.add(new)
            else:
                done.add(new)
                self._answered[new.pod(self._job)] = asyncio.get_running_loop().time()

        assert self._memory is not None
        _, error = await together(plan.create, one)
        left = [new for new in plan.create if new not in done | taken]
        self._memory = supply.refused(supply.refused(self._memory, left), taken, taken=True)
        if error is None:
            if not self._memory.closed:  # then what was refused is not asked for
                self.refused, self._denied, self._pause = "", False, 0.0
            return
        self.refused, self._denied = str(error), isinstance(error, Forbidden | Invalid)
        self._pause = min(max(1.0, 2 * self._pause), LONGEST_PAUSE)
        self._not_before = now + self._pause
        if is_quota(self.refused):
            self._quota.set()
        log.warning("no pods for now, again in %g s: %s", self._pause, error)

    async def _delete(self, items: Sequence[tuple[str, str]], here: dict[str, Pod]) -> None:
        """Names, each with the reason."""

        async def one(item: tuple[str, str]) -> None:
            name, reason = item
            if (found := here.get(name)) is not None:
                log.info("deleting %s: %s", name, reason)
                await self._writer.delete(self._uid, PODS, self._namespace, name, found.uid)

        _, error = await together(items, one)
        if error is not None:
            log.warning("a pod cannot be deleted now: %s", error)

    async def empty(self) -> None:
        """Delete every pod, and wait until none is left."""
        self.said, self.refused = None, ""
        await self._pods.synced.wait()
        while here := {found.name: found for found in self.pods}:
            self._stirred.clear()
            left = [(name, "no pod is wanted") for name in here if not here[name].deleting]
            await self._delete(left, here)
            await self._rest(asyncio.sleep, LOOK)

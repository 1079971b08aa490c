"""Joins a master and its launcher on Kubernetes, which know nothing of each other."""

import contextlib
import io
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from elastic import options
from elastic.k8s.causes import Cause as PodCause
from elastic.k8s.causes import Verdict, short
from elastic.k8s.launcher import Supplier
from elastic.k8s.recalling import MOST_PENDING, ROOM_PENDING, within
from elastic.k8s.spec import Spec, main_container
from elastic.k8s.supply import Plan, Wanted
from elastic.master import events as ev
from elastic.master import prechecks
from elastic.master.events import NodeId
from elastic.master.launcher import Master, Saved
from elastic.master.nodes import NodeState
from elastic.master.policy import Policy
from elastic.master.recovery import Cause
from elastic.master.state import Job, Why
from elastic.proto.elasticjob import Workers
from elastic.proto.ending import Ended
from elastic.proto.job_folder import step_of

PROGRAMS = ("elastic-run", "torchrun")
OWN = (
    "max_restarts", "rank_unit", "preparation", "lease", "below_min_timeout", "hang_floor", "straggler_interval",
    "failure_grace",
)  # fmt: skip
"""Flags of theirs that a master decides by, and that the spec has no field for."""

_ENDS: Mapping[str, str] = {
    PodCause.OOM: Cause.KERNEL_OOM,
    PodCause.IMAGE: Why.IMAGE,
    PodCause.HARDWARE: Cause.HARDWARE,
    PodCause.HANG: Cause.HANG,
    Ended.UNSCHEDULABLE: Why.UNSCHEDULABLE,
    Ended.QUOTA: Why.QUOTA,
}
"""What the job fails of, by what the pods do; else it is the script's error."""


class Supplied:
    """A launcher, as the master knows one; and the master, as `Supplier` knows it."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier
        self._master: Master | None = None

    async def run(self, master: Master) -> None:
        self._master = master
        await self._supplier.run(self, master.changed)

    @property
    def job(self) -> Job | None:
        """None: no master has begun."""
        return None if self._master is None else self._master.job

    @property
    def saved(self) -> Saved:
        return Saved() if self._master is None else self._master.saved

    @property
    def metrics(self) -> dict[str, Any]:
        """What the script said of its newest step."""
        return (self._master and step_of(self._master.metrics)) or {}

    def now(self) -> float:
        """Job time."""
        return 0.0 if self._master is None else self._master.now()

    def drain(self, reason: str) -> None:
        """The whole job: its ranks save, and leave."""
        master = self._master
        if master is None or master.job.result is not None:
            return
        current = master.job.round
        change = current.change if current is not None and current.standing else None
        if change is None or not change.ends:
            master.fold(ev.DrainAsked(None, reason))

    @property
    def _there(self) -> Master:
        assert self._master is not None
        return self._master

    def nodes(self) -> frozenset[str]:
        return frozenset(self._there.job.nodes)

    def attached(self) -> frozenset[str]:
        if (job := self.job) is None:
            return frozenset()
        return frozenset(n.node_id for n in job.nodes.values() if n.state is NodeState.ATTACHED)

    def slow(self) -> frozenset[str]:
        current = self._there.job.round
        return frozenset(n for s in (current.stragglers if current else ()) for n in s.nodes)

    def unfit(self) -> dict[str, str]:
        job = self._there.job
        assert job.policy is not None
        found = prechecks.unfit(job.nodes, job.checks, job.policy)
        return {str(node_id): what for node_id, what in found.items()}

    def known(self) -> frozenset[str]:
        job = self._there.job
        seated = {seat.node_id for seat in job.round.seats} if job.round is not None else set()
        return frozenset({*job.nodes, *seated, *(node_id for node_id, _, _ in job.spent)})

    def step(self) -> int:
        return self._there.job.ledger.step

    def over(self) -> bool:
        return self._there.job.result is not None

    def removed(self, gone: list[tuple[str, Verdict]]) -> None:
        self._there.fold(
            ev.Removed(
                tuple(
                    ev.Removal(
                        node_id=NodeId(name),
                        cause=_charged(verdict),
                        reason=verdict.reason,
                        exit_code=verdict.exit_code,
                        out_of_memory=verdict.cause is PodCause.OOM,
                    )
                    for name, verdict in gone
                )
            )
        )

    def withdrawn(self, leave: tuple[tuple[str, str], ...]) -> None:
        self._there.fold(ev.Withdrawn(tuple((NodeId(name), why) for name, why in leave)))

    def replaced(self, leave: tuple[tuple[str, str], ...]) -> None:
        nodes = tuple((NodeId(name), why) for name, why in leave)
        self._there.fold(ev.Withdrawn(nodes, Why.UNHEALTHY))

    def resized(self, least: int, most: int, wanted: Wanted) -> None:
        policy = self._there.job.policy
        now = None if policy is None else (policy.min_nodes, policy.max_nodes, policy.node_unit)
        unit = 1 if wanted.sizes else wanted.unit
        if now != (least, most, unit):
            self._there.fold(ev.Resized(min_nodes=least, max_nodes=most, node_unit=unit))

    def failed(self, cause: str, reason: str) -> None:
        self._there.fold(ev.FailAsked(cause=_ENDS.get(cause, Cause.ERROR), reason=reason))

    def restart(self, reason: str) -> None:
        self._there.fold(ev.RestartAsked(reason))


_HANGS = {"DumpAndRestart": "recover", "DumpOnly": "dump", "Fail": "fail"}
"""`healthCheck.hang.action`, in the master's words."""


def policy(spec: Spec) -> Policy:
    """What the master decides by."""
    hang, drain = spec.health_check.hang, float(spec.flash_checkpoint.drain_seconds)
    sizes = tuple(sorted(spec.elastic.discrete_sizes))
    said = Policy(
        min_nodes=spec.least,
        max_nodes=spec.replicas,
        node_unit=1 if sizes else spec.elastic.node_unit,
        sizes=sizes,
        supplied=True,
        last_call=float(spec.elastic.last_call_seconds),
        fault_budget=spec.failure_policy.max_restarts,
        precheck=spec.health_check.preflight.lower(),
        exclude_straggler=spec.health_check.exclude_stragglers,
        hang_action=_HANGS[hang.action] if hang.enabled else "ignore",
        drain_timeout=drain,
    )
    with contextlib.suppress(ValueError):  # elastic-run says in its pod what is wrong with them
        return replace(said, **_own(spec))
    return said


def _own(spec: Spec) -> dict[str, Any]:
    """Of the elastic-run that the pods start, what its flags say and no field does; nothing where none is seen to be."""
    words = list(_words(main_container(spec.pod)))
    start = next((n for n, word in enumerate(words) if PurePath(word).name in PROGRAMS), len(words))
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        said = options.make_parser({}).parse(words[start + 1 :])
        return {name: getattr(said, name) for name in OWN if name in said.given}
    return {}  # no elastic-run, or one that will say what is wrong with its flags


def _words(container: Mapping[str, Any]) -> Iterator[str]:
    """Of its command, those of a shell's script too."""
    said = [*(container.get("command") or ()), *(container.get("args") or ())]
    for before, word in zip(["", *said], said, strict=False):
        try:
            yield from shlex.split(word) if before == "-c" else [word]
        except ValueError:  # a quote that is left open
            yield word


def workers(said: Plan | None, refused: str) -> Workers:
    """Of `status.job`."""
    if said is None:
        return Workers(refused=short(refused))
    return Workers(
        desired=said.desired,
        ready=said.ready - said.waiting - said.spares,
        waiting=said.waiting,
        spares=said.spares,
        pending=within((why for _, why in said.pending), MOST_PENDING, ROOM_PENDING),
        refused=short(refused),
    )


def _charged(verdict: Verdict) -> Cause:
    if not verdict.counts:
        return Cause.PREEMPTED
    return Cause.KERNEL_OOM if verdict.cause is PodCause.OOM else Cause.NODE_LOST

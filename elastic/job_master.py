"""The master of an ElasticJob, in the job's master pod: serves by what the operator has accepted, tells what is.

One life of this program may serve several times: a job that is suspended goes on with the next attempt.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from elastic import supplied
from elastic.k8s import pods, recalling
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.errors import ApiError
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.writes import Writer
from elastic.k8s.launcher import Supplier
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.spec import Spec, read
from elastic.k8s.supply import New
from elastic.k8s.wanted import limits, wanted
from elastic.master import endings
from elastic.master.main import MasterSettings, serve
from elastic.master.state import Job, Result
from elastic.proto import elasticjob, ending, env, schema
from elastic.proto.elasticjob import Accepted, JobState, Training
from elastic.proto.ending import Ended, Ending
from elastic.proto.errors import ElasticError, UsageError
from elastic.proto.security import Security, read_token

log = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
EVERY = 5.0
"""Seconds between two writes of the status, but for what is urgent."""
FRESH = 90.0
"""Seconds without a word of the server after which nothing is written: another may serve by now."""

Json = dict[str, Any]
State = Literal["Starting", "Running", "Suspending", "Suspended", "Stopping", "Ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The resource, as far as it matters here."""

    uid: str
    accepted: Accepted | None
    state: JobState | None
    """What this master said before it started anew, or another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    namespace: str
    name: str
    """Of the resource: the run id, too."""
    folder: Path
    """For the journal."""
    address: str
    """host:port, as agents dial it."""
    listen: str = ""
    """host:port, where that is another."""
    pod: str = ""
    """Its own name; empty: the operator told none, and each `accepted` is obeyed."""


class JobMaster:
    """make: the manifest of a worker pod, which keeps away from these nodes."""

    def __init__(
        self,
        api: Api,
        place: Place,
        security: Security,
        make: Callable[[str, Spec, New, tuple[str, ...]], Json],
    ) -> None:
        self._api, self._place, self._security, self._make = api, place, security, make
        self._stirred = asyncio.Event()
        self._jobs: Reflector[Seen] = Reflector(
            api,
            ELASTICJOBS,
            project=_seen,
            changed=lambda old, new: self._stirred.set(),
            namespace=place.namespace,
            fields=f"metadata.name={place.name}",
        )
        self._writer = Writer(api, manager=elasticjob.MASTER, held=self._held)
        self._told: JobState | None = None
        self._told_at = float("-inf")
        self._attempt = 0
        self._stepped: tuple[int, float | None] = (0, None)
        """The last step, and when it was seen to be finished."""

    async def run(self) -> JobState | None:
        """Until the job has ended; returns what was said last. None: another master has taken over."""
        watch = asyncio.create_task(self._jobs.run())
        try:
            await self._jobs.synced.wait()
            while True:
                uid, accepted = await self._accepted()
                if not accepted.names(self._place.pod):
                    self._leave()
                    return None
                supplier = self._supplier(uid, read(accepted.spec))
                pods = asyncio.create_task(supplier.watch())
                try:
                    over = await self._serve(uid, accepted, supplier)
                finally:
                    await _end(pods)
                if over:
                    return self._told
        finally:
            await _end(watch)

    # --- what the operator says ------------------------------------------------------------------

    def _now(self) -> tuple[str, Accepted] | None:
        found = self._jobs.get(self._place.namespace, self._place.name)
        return None if found is None or found.accepted is None else (found.uid, found.accepted)

    async def _accepted(self) -> tuple[str, Accepted]:
        while (now := self._now()) is None:
            self._stirred.clear()
            await self._stirred.wait()
        return now

    def _held(self) -> bool:
        """This master may still write: the server is heard, and names neither another pod nor a later attempt."""
        fresh = asyncio.get_running_loop().time() - self._jobs.heard < FRESH
        now = self._now()
        return fresh and (now is None or self._is_meant(now[1]))

    def _is_meant(self, accepted: Accepted) -> bool:
        return accepted.names(self._place.pod) and accepted.attempt <= max(self._attempt, 1)

    def _supplier(self, uid: str, spec: Spec) -> Supplier:
        def make(new: New, avoid: tuple[str, ...]) -> Json:
            now = self._now()
            newest = spec if now is None else read(now[1].spec)
            return self._make(uid, newest, new, avoid)

        return Supplier(
            self._api,
            self._writer,
            namespace=self._place.namespace,
            job=self._place.name,
            uid=uid,
            label=elasticjob.UID_LABEL,
            wanted=wanted(spec),
            limits=limits(spec),
            make=make,
            known=recalling.recalled(self._told or self._said()),
        )

    def _said(self) -> JobState | None:
        found = self._jobs.get(self._place.namespace, self._place.name)
        return None if found is None else found.state

    # --- one attempt -----------------------------------------------------------------------------

    async def _serve(self, uid: str, accepted: Accepted, supplier: Supplier) -> bool:
        """Returns whether all is over; else the next attempt begins, this master's or another's."""
        self._attempt = accepted.attempt
        spec, joined = read(accepted.spec), supplied.Supplied(supplier)
        if accepted.wanted == "Run":
            await self._tell(uid, self._state(accepted, "Starting", None, supplier))
            settings = MasterSettings(
                run_id=self._place.name,
                address=self._place.address,
                listen=self._place.listen,
                run_dir=self._place.folder,
                policy=supplied.policy(spec),
                security=self._security,
                launch=f"{uid}-{accepted.attempt}",
                notify=spec.notify,
                job_uid=uid,
                least_epoch=accepted.attempt << 16,
            )
            served = asyncio.create_task(serve(settings, joined))
            try:
                result = await self._follow(uid, accepted, supplier, joined, served)
            finally:
                await _end(served)
            accepted = self._newest(accepted)
            if result is None or not self._is_meant(accepted):
                return self._leave()
            if not result.resumable:
                await self._tell(uid, self._ended(accepted, result, joined.job, supplier))
                return True
        return await self._rest(uid, accepted, supplier)

    async def _follow(
        self,
        uid: str,
        accepted: Accepted,
        supplier: Supplier,
        joined: supplied.Supplied,
        served: "asyncio.Task[Result | None]",
    ) -> Result | None:
        while not served.done():
            self._stirred.clear()
            accepted = self._newest(accepted)
            if not self._is_meant(accepted):
                return None
            spec = read(accepted.spec)
            if supplier.wanted != wanted(spec):
                supplier.wanted, supplier.limits = wanted(spec), limits(spec)
                supplier.wake()
            if accepted.wanted != "Run":
                joined.drain("suspended" if accepted.wanted == "Suspend" else "deleted")
            self._note_step(joined.job)
            state: State = "Running" if joined.job and joined.job.last_round else "Starting"
            if accepted.wanted != "Run":
                state = "Suspending" if accepted.wanted == "Suspend" else "Stopping"
            await self._tell(uid, self._state(accepted, state, joined.job, supplier))
            waits = {served, asyncio.ensure_future(self._stirred.wait())}
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits - {served}:
                wait.cancel()
        return served.result()

    async def _rest(self, uid: str, accepted: Accepted, supplier: Supplier) -> bool:
        """Every pod goes; after that it is suspended until the next attempt, or has ended."""
        going: State = "Stopping" if accepted.wanted == "Stop" else "Suspending"
        await self._tell(uid, self._state(accepted, going, None, supplier))
        if not await self._emptied(accepted, supplier):
            return self._leave()
        if accepted.wanted == "Stop":
            stopped = self._state(accepted, "Ended", None, supplier)
            await self._tell(uid, replace(stopped, outcome="Stopped", reason="Stopped"))
            return True
        await self._tell(uid, self._state(accepted, "Suspended", None, supplier))
        while True:
            self._stirred.clear()
            now = self._newest(accepted)
            if now.wanted != "Suspend" or not self._is_meant(now):
                return False
            await self._stirred.wait()

    def _leave(self) -> bool:
        """For good, with nothing said of how the job ended."""
        log.warning("another master serves this job, or this one was told to go")
        self._told = None
        return True

    async def _emptied(self, accepted: Accepted, supplier: Supplier) -> bool:
        """Every pod is gone; False: another master is meant meanwhile, whose pods they are."""
        emptied = asyncio.ensure_future(supplier.empty())
        try:
            while not emptied.done():
                self._stirred.clear()
                if not self._is_meant(self._newest(accepted)):
                    return False
                stirred = asyncio.ensure_future(self._stirred.wait())
                await asyncio.wait({emptied, stirred}, return_when=asyncio.FIRST_COMPLETED)
                stirred.cancel()
        finally:
            await _end(emptied)
        return not emptied.cancelled()

    def _newest(self, accepted: Accepted) -> Accepted:
        now = self._now()
        return accepted if now is None else now[1]

    def _note_step(self, job: Job | None) -> None:
        """When the last step was finished; a script that tells no numbers finishes some while it steps."""
        ledger = job.ledger if job else None
        if ledger and (ledger.step != self._stepped[0] or (ledger.stepping and not ledger.step)):
            self._stepped = ledger.step, time.time()

    # --- what it says ----------------------------------------------------------------------------

    def _state(
        self, accepted: Accepted, state: State, job: Job | None, supplier: Supplier
    ) -> JobState:
        current = None if job is None else job.round
        standing = current is not None and current.standing
        ledger = job.ledger if job else None
        return JobState(
            generation=accepted.generation,
            attempt=self._attempt,
            state=state,
            workers=supplied.workers(supplier.said, supplier.refused),
            world_size=sum(s.ranks for s in current.seats) if current and standing else 0,
            round=job.last_round if job else 0,
            restarts=job.restart_count if job else 0,
            restarts_counted=job.recovery.faults if job else 0,
            productive_seconds=round(ledger.productive, 1) if ledger else 0.0,
            training=Training(step=ledger.step if ledger else 0, stepped_at=self._stepped[1]),
            last_failures=supplier.failures,
            avoided_nodes=recalling.avoided(supplier.placing),
            remembered=supplier.remembered,
        )

    def _ended(
        self, accepted: Accepted, result: Result, job: Job | None, supplier: Supplier
    ) -> JobState:
        return replace(
            self._state(accepted, "Ended", job, supplier),
            outcome="Succeeded" if result.exit_code == 0 else "Failed",
            reason=str(endings.kind_of(result.exit_code, result.cause)),
            message=result.reason,
            world_size=0,
        )

    async def _tell(self, uid: str, state: JobState) -> None:
        now = asyncio.get_running_loop().time()
        before = None if self._told is None else _urgent(self._told)
        if before == _urgent(state) and now < self._told_at + EVERY:
            return
        if state == self._told:
            return
        try:
            await self._writer.apply_status(
                ELASTICJOBS,
                self._place.namespace,
                self._place.name,
                uid,
                {"job": schema.dump(state)},
            )
        except ApiError as error:
            log.warning("the status cannot be written now: %s", error)
            return
        self._told, self._told_at = state, now


async def _end(task: "asyncio.Future[Any]") -> None:
    """With its connections closed."""
    task.cancel()
    await asyncio.wait([task])


def _seen(raw: Json) -> Seen:
    status = raw.get("status") or {}
    return Seen(
        uid=raw["metadata"]["uid"],
        accepted=elasticjob.accepted(status),
        state=elasticjob.job_state(status),
    )


def _urgent(state: JobState) -> tuple[object, ...]:
    """What is told at once: where the job is, and what the next master would count wrongly without."""
    return state.state, state.attempt, state.avoided_nodes, state.remembered.slots


# --- the program ---------------------------------------------------------------------------------


def place(environ: Mapping[str, str]) -> Place:
    """What `k8s/pods.py` tells the master's pod. Raises UsageError."""
    names = (env.MASTER_JOB, env.MASTER_ADDRESS, env.MASTER_IP, env.MASTER_FOLDER)
    if missing := [name for name in names if not environ.get(name)]:
        raise UsageError(
            f"{', '.join(missing)} not set: this program runs in the master pod of an ElasticJob"
        )
    namespace, _, name = environ[env.MASTER_JOB].partition("/")
    address, ip = environ[env.MASTER_ADDRESS], environ[env.MASTER_IP]
    port = address.rpartition(":")[2]
    return Place(
        namespace=namespace,
        name=name,
        folder=Path(environ[env.MASTER_FOLDER]),
        address=address,
        listen=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
        pod=environ.get(env.MASTER_POD, ""),
    )


def last_words(state: JobState | None) -> Ending:
    """Of a life that served to the job's end, or until another took over."""
    if state is None or state.state != "Ended":
        return Ending(kind=Ended.STOPPED, reason="another master serves this job")
    known = {str(kind) for kind in Ended}
    usual = Ended.FINISHED if state.outcome == "Succeeded" else Ended.USER_ERROR
    kind = Ended(state.reason) if state.reason in known else usual
    return Ending(kind=kind, reason=state.message, step=state.training.step)


async def _run(here: Place, security: Security) -> JobState | None:
    def make(uid: str, spec: Spec, new: New, avoid: tuple[str, ...]) -> Json:
        owner = pods.Owner(namespace=here.namespace, name=here.name, uid=uid)
        return pods.worker(owner, spec, new, avoid)

    async with await Api.connect() as api:
        return await JobMaster(api, here, security, make).run()


def main() -> int:
    """0 also where the job has failed: what ends with another code is started again by its node."""
    logging.basicConfig(level=logging.INFO, format="elastic-master: %(message)s")
    environ = env.process_environment()
    env.configure_grpc()
    try:
        here = place(environ)
        state = asyncio.run(_run(here, Security(token=read_token(environ, None))))
    except ElasticError as error:
        log.error("%s", error)
        return 2 if isinstance(error, UsageError) else 1
    ending.leave(TERMINATION_LOG, last_words(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())

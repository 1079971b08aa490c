"""The master of an ElasticJob, in the job's master pod: serves by what the operator has accepted, tells what is.

One life of this program may serve several times: a job that is suspended goes on with the next attempt.
"""

import asyncio
import contextlib
import functools
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from elastic import supplied, telling
from elastic.job_place import Place, Seen, place, seen
from elastic.k8s import pods, recalling
from elastic.k8s.kernel.api import Api
from elastic.k8s.kernel.errors import ApiError, Forbidden, Unauthorized
from elastic.k8s.kernel.reflector import Reflector
from elastic.k8s.kernel.writes import Writer
from elastic.k8s.launcher import Supplier
from elastic.k8s.resources import ELASTICJOBS
from elastic.k8s.spec import Spec, read
from elastic.k8s.supply import New
from elastic.k8s.wanted import limits, wanted
from elastic.master import endings
from elastic.master.main import MasterSettings, serve
from elastic.master.state import Result
from elastic.proto import elasticjob, ending, env, schema
from elastic.proto.elasticjob import Accepted, JobState, Snapshots, Training
from elastic.proto.errors import ElasticError, ProtocolMismatch, UsageError
from elastic.proto.security import Security, read_token

log = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
EVERY = 5.0
"""Seconds between two writes of the status, but for what is urgent."""
FRESH = 90.0
"""Seconds without a word of the server after which nothing is written: another may serve by now."""
GATHER = 30.0
"""Seconds for which a master that begins anew waits for the agents of pods that run, before it has them leave."""
UNTOLD = 16
"""Rounds that may have been since a master, whose journal is lost, last said how many there were."""
MOST_MESSAGE = 1000
"""Characters of the sentence that says how the job ended."""

T = TypeVar("T")
Json = dict[str, Any]
State = Literal["Starting", "Running", "Suspending", "Suspended", "Stopping", "Ended"]


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
            project=seen,
            changed=lambda old, new: self._stirred.set(),
            namespace=place.namespace,
            fields=f"metadata.name={place.name}",
        )
        self._writer = Writer(api, manager=elasticjob.MASTER, held=self._held)
        self._told: JobState | None = None
        self._last: JobState | None = None
        """While it served; else what the master before this one said."""
        self._told_at = float("-inf")
        self._attempt = 0
        self._stepped: tuple[int, float | None] | None = None
        """The last step, and when it was seen to be finished."""
        self._told_to_end = asyncio.Event()
        self._leaves_ranks = asyncio.Event()
        """At once, that is, with no word to them: another master comes."""
        self._bound = False
        """It serves, or says the job's end: it leaves by itself, once that is done."""

    async def run(self) -> JobState | None:
        """Until the job has ended; returns what was said last. None: another master has taken over, or is to."""
        living = asyncio.ensure_future(_beside(self._live, self._jobs.run))

        def leave() -> None:
            """As its node, or its operator, has it. Where the garbage collector does, who is deleting its job in the
            foreground, no other master comes: it stays until its ranks have saved."""
            self._told_to_end.set()
            if not self._bound:
                living.cancel()
            elif not self._is_deleted():
                self._leaves_ranks.set()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
        try:
            return await living
        except asyncio.CancelledError:
            if not self._told_to_end.is_set():
                raise
            self._leave()
            return None
        finally:
            await _end(living)

    async def _live(self) -> JobState | None:
        await self._jobs.synced.wait()
        while True:
            uid, accepted = await self._accepted()
            found = self._seen
            self._last = self._last or (found.said if found else None)
            if not accepted.names(self._place.pod):
                self._leave()
                return None
            if self._told is None and self._last is not None and self._last.state == "Ended":
                log.warning("this job has ended: its operator had not heard of it")
                return self._last
            supplier = self._supplier(uid, read(accepted.spec))
            serving = functools.partial(self._serve, uid, accepted, supplier)
            if await _beside(serving, supplier.watch):
                return self._told

    # --- what the operator says ------------------------------------------------------------------

    @property
    def _seen(self) -> Seen | None:
        return self._jobs.get(self._place.namespace, self._place.name)

    def _now(self) -> tuple[str, Accepted] | None:
        found = self._seen
        return None if found is None or found.accepted is None else (found.uid, found.accepted)

    def _is_deleted(self) -> bool:
        return self._seen is not None and self._seen.deleted

    async def _accepted(self) -> tuple[str, Accepted]:
        """Raises ProtocolMismatch; a master that serves already goes on by what it could read."""
        while (now := self._now()) is None:
            found = self._seen
            if found is not None and found.refused:
                raise ProtocolMismatch(found.refused)
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
            known=recalling.recalled(self._told or self._last),
        )

    # --- one attempt -----------------------------------------------------------------------------

    async def _serve(self, uid: str, accepted: Accepted, supplier: Supplier) -> bool:
        """Returns whether all is over; else the next attempt begins, this master's or another's."""
        self._attempt = accepted.attempt
        spec, joined = read(accepted.spec), supplied.Supplied(supplier)
        if accepted.wanted == "Run" or await supplier.running():  # which are to save first
            await self._tell(uid, self._state(accepted, _going(accepted, begun=False), supplier))
            said = 0 if self._last is None else self._last.round
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
                least_round=said + UNTOLD if said else 0,
            )
            self._bound = True
            served = asyncio.create_task(serve(settings, joined, self._leaves_ranks))
            try:
                result = await self._follow(uid, accepted, supplier, joined, served)
            finally:
                await _end(served)
            accepted = self._newest(accepted)
            if result is None or not self._is_meant(accepted):
                return self._leave()
            if not result.resumable:
                ended = self._ended(accepted, result, joined, supplier)
                return await self._say_the_end(uid, accepted, ended)
            self._learn(accepted, "Suspending", joined, supplier)  # with what was saved at the end
            self._bound = False
        if self._told_to_end.is_set():
            return self._leave()
        return await self._rest(uid, accepted, supplier)

    async def _follow(
        self,
        uid: str,
        accepted: Accepted,
        supplier: Supplier,
        joined: supplied.Supplied,
        served: "asyncio.Task[Result | None]",
    ) -> Result | None:
        # Where it was to run at first, who has not attached by now has nothing to save.
        loop = asyncio.get_running_loop()
        until = loop.time() + (0.0 if accepted.wanted == "Run" else GATHER)
        while not served.done():
            self._stirred.clear()
            accepted = self._newest(accepted)
            if not self._is_meant(accepted):
                return None
            spec = read(accepted.spec)
            if (supplier.wanted, supplier.limits) != (wanted(spec), limits(spec)):
                supplier.wanted, supplier.limits = wanted(spec), limits(spec)
                supplier.wake()
            supplier.makes = accepted.wanted == "Run"
            late = loop.time() >= until
            if accepted.wanted != "Run" and (late or await supplier.running() <= joined.attached()):
                joined.drain("suspended" if accepted.wanted == "Suspend" else "deleted")
            state = _going(accepted, begun=bool(joined.job and telling.begun(joined.job)))
            await self._tell(uid, self._learn(accepted, state, joined, supplier))
            waits = {served, asyncio.ensure_future(self._stirred.wait())}
            try:
                await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits - {served}:
                    wait.cancel()
        return served.result()

    async def _rest(self, uid: str, accepted: Accepted, supplier: Supplier) -> bool:
        """Every pod goes; after that it is suspended until the next attempt, or has ended."""
        if self._last is not None:  # what was done before does not say that it trains afterwards
            trained = replace(self._last.training, stepped_at=None)
            self._last, self._stepped = replace(self._last, training=trained), None
        await self._tell(uid, self._state(accepted, _going(accepted, begun=True), supplier))
        if not await self._emptied(accepted, supplier):
            return self._leave()
        if accepted.wanted == "Stop":
            stopped = self._state(accepted, "Ended", supplier)
            stopped = replace(stopped, outcome="Stopped", reason="Stopped")
            return await self._say_the_end(uid, accepted, stopped)
        while True:
            self._stirred.clear()
            await self._tell(uid, self._state(accepted, "Suspended", supplier))
            now = self._newest(accepted)
            if now.wanted != "Suspend" or not self._is_meant(now):
                return False
            await self._stirred_or_late()  # what could not be written is, after a while

    async def _say_the_end(self, uid: str, accepted: Accepted, state: JobState) -> bool:
        """Until it is written: who does not hear of an end begins another attempt. Of a job that is deleted it may be
        too late, for itself or for the right to write: its operator waits for the last worker pod."""
        self._bound = True
        while True:
            self._stirred.clear()
            refused = await self._tell(uid, state)
            if self._told == state:
                return True
            found = self._seen
            gone = found is None or found.uid != uid
            gone = gone or (self._is_deleted() and isinstance(refused, (Forbidden, Unauthorized)))
            if gone or not self._is_meant(self._newest(accepted)):
                return self._leave()
            await self._stirred_or_late()

    async def _stirred_or_late(self) -> None:
        """Wait until something has changed, or for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EVERY):
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
                try:
                    await asyncio.wait({emptied, stirred}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stirred.cancel()
        finally:
            await _end(emptied)
        emptied.result()
        return True

    def _newest(self, accepted: Accepted) -> Accepted:
        now = self._now()
        return accepted if now is None else now[1]

    # --- what it says ----------------------------------------------------------------------------

    def _learn(
        self, accepted: Accepted, state: State, joined: supplied.Supplied, supplier: Supplier
    ) -> JobState:
        """What the master does by now, which is what was done for whatever is said later."""
        if (job := joined.job) is None:
            return self._state(accepted, state, supplier)
        ledger, before, now = job.ledger, self._last, time.time()
        trained = before.training if before else Training()
        self._stepped = telling.stepped(self._stepped, trained, ledger, now)
        supplier.failures = telling.timed(supplier.failures, ledger, now - joined.now())
        current = job.round
        standing = current is not None and current.standing
        kept = before.checkpoint if before else Snapshots()
        said = telling.booked(self._state(accepted, state, supplier), job, joined.now())
        self._last = replace(
            said,
            world_size=sum(s.ranks for s in current.seats) if current and standing else 0,
            round=job.last_round,
            restarts=job.restart_count,
            restarts_counted=job.recovery.faults,
            training=telling.training(ledger.step, self._stepped[1], joined.metrics),
            checkpoint=telling.snapshots(joined.saved, kept, now),
        )
        return self._last

    def _state(self, accepted: Accepted, state: State, supplier: Supplier) -> JobState:
        """While nobody serves: what was done stays as it was said."""
        said = JobState(
            generation=accepted.generation,
            attempt=self._attempt,
            state=state,
            workers=supplied.workers(supplier.said, supplier.refused),
            last_failures=supplier.failures,
            avoided_nodes=recalling.avoided(supplier.placing),
            remembered=supplier.remembered,
        )
        return said if self._last is None else telling.resting(said, self._last)

    def _ended(
        self, accepted: Accepted, result: Result, joined: supplied.Supplied, supplier: Supplier
    ) -> JobState:
        return replace(
            self._learn(accepted, "Ended", joined, supplier),
            outcome="Succeeded" if result.exit_code == 0 else "Failed",
            reason=str(endings.kind_of(result.exit_code, result.cause)),
            message=result.reason[:MOST_MESSAGE],
            world_size=0,
        )

    async def _tell(self, uid: str, state: JobState) -> ApiError | None:
        """Returns why it could not be written."""
        now = asyncio.get_running_loop().time()
        before = None if self._told is None else _urgent(self._told)
        if before == _urgent(state) and now < self._told_at + EVERY:
            return None
        if state == self._told:
            return None
        # Nothing is said of what is empty: the server makes null of an object that has become so.
        body = {name: value for name, value in schema.dump(state).items() if value != {}}
        place = self._place.namespace, self._place.name
        try:
            await self._writer.apply_status(ELASTICJOBS, *place, uid, {"job": body})
        except ApiError as error:
            log.warning("the status cannot be written now: %s", error)
            return error
        self._told, self._told_at = state, now
        return None


def _going(accepted: Accepted, *, begun: bool) -> State:
    """begun: ranks have trained in this life."""
    if accepted.wanted == "Run":
        return "Running" if begun else "Starting"
    return "Suspending" if accepted.wanted == "Suspend" else "Stopping"


async def _beside(
    work: Callable[[], Coroutine[Any, Any, T]], watch: Callable[[], Coroutine[Any, Any, None]]
) -> T:
    """The work, and what it goes by, which has no end of its own: a bug in that ends both. They are called here, since
    this may be cancelled before it begins."""
    working, watching = asyncio.ensure_future(work()), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
            raise RuntimeError("a watch has ended")
        return working.result()
    finally:
        await _end(working)
        await _end(watching)


async def _end(task: "asyncio.Future[Any]") -> None:
    """With its connections closed."""
    task.cancel()
    await asyncio.wait([task])


def _urgent(state: JobState) -> tuple[object, ...]:
    """What is told at once: where the job is, and what the next master would count wrongly without."""
    return state.state, state.attempt, state.avoided_nodes, state.remembered.slots


# --- the program ---------------------------------------------------------------------------------


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
        ending.leave(TERMINATION_LOG, telling.of_error(error))
        return 2 if isinstance(error, UsageError) else 1
    ending.leave(TERMINATION_LOG, telling.last_words(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())

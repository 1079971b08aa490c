"""One pod on a simulated node, from its binding until nothing is left of it."""

import asyncio
import contextlib
import json
import logging
import shutil
from asyncio import FIRST_COMPLETED
from collections.abc import Mapping
from typing import Any

from urllib3.exceptions import HTTPError

from scripts.kubernetes import status, volumes, words
from scripts.kubernetes.client import ApiError
from scripts.kubernetes.containers import Container, Plan, now
from scripts.kubernetes.environment import ConfigError
from scripts.kubernetes.hosting import Host, plan_of
from scripts.kubernetes.images import pull_error
from scripts.kubernetes.status import Run

_LOG = logging.getLogger(__name__)
Object = dict[str, Any]
RETRY_SECONDS = 0.5
"""After a missing source, a failed pull, a call that failed."""
BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Before the first restart in place and those after it; the real one's are 20 times as long."""


class Pod:
    """Its containers, and what is told of them."""

    def __init__(self, manifest: Object, host: Host) -> None:
        self.manifest = manifest
        self.uid: str = manifest["metadata"]["uid"]
        self.address = host.address()
        self._host = host
        self._folder = host.folder / self.uid
        self._started = now()
        self._phase = "Pending"
        self._extra: Object = {}
        self._obeyed: set[str] = set()
        self._told: Object = {}
        self._since: dict[str, tuple[str, str]] = {}
        self._init = [Run(manifest=each) for each in manifest["spec"].get("initContainers", [])]
        self._main = [Run(manifest=each) for each in manifest["spec"]["containers"]]
        self._initialized = not self._init
        self._containers: dict[str, Container] = {}
        self._gone = False
        self._crashed = False
        self._changed = asyncio.Event()
        self._living: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._work())

    def update(self, manifest: Object) -> None:
        """The object changed, or its node is back."""
        self.manifest = manifest
        self._changed.set()

    def gone(self) -> None:
        """The object is no more: all that is left ends at once."""
        self._gone = True
        self._changed.set()

    def crash(self) -> None:
        """Its node lost power; when the node is back, what may start again does."""
        self._crashed = True
        if self._living:
            self._living.cancel()
        for container in self._containers.values():
            container.kill()

    def freeze(self, *, still: bool) -> None:
        """Its node hangs, or goes on."""
        for container in self._containers.values():
            container.freeze(still=still)

    def rewrite_hosts(self) -> None:
        """After a change of a Service; in place, since it is mounted into the containers."""
        path = self._folder / "hosts"
        text = self._host.hosts(self.manifest, self.address)
        with contextlib.suppress(FileNotFoundError):  # not yet, or no more: a thread takes it away
            if path.read_text().rstrip("\n") != text.rstrip("\n"):
                with path.open("r+b") as file:  # one write, never shorter: a reader sees old or new
                    file.write(text.encode().ljust(path.stat().st_size, b"\n"))

    async def _work(self) -> None:
        self._begin()
        try:
            while not self._gone:
                if self._host.quiet(self.manifest["spec"]["nodeName"]):
                    self._told = {}  # others write its status now
                else:
                    await self._reboot()
                    if "deletionTimestamp" in self.manifest["metadata"]:
                        break
                    await self._obey()
                    await self._tell()
                await self._changed.wait()
                self._changed.clear()
            await self._stop()
            while not self._gone and not await self._leave():
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            for container in self._containers.values():
                container.kill()
            if self._living:
                self._living.cancel()
            await self._host.call(self._clean)

    def _begin(self) -> None:
        self._living = asyncio.create_task(self._live())
        self._living.add_done_callback(_log_failure)

    async def _reboot(self) -> None:
        """After a crash of its node."""
        if not self._crashed:
            return
        self._crashed = False
        policy = self.manifest["spec"].get("restartPolicy", "Always")
        await self._see_ends()
        codes = [run.state.get("terminated", {}).get("exitCode", 0) for run in self._main]
        if not any(status.restarts(policy, code) for code in codes):
            self._become("Failed" if any(codes) else "Succeeded")
        elif "deletionTimestamp" not in self.manifest["metadata"]:
            for run in self._main:
                run.last, run.restarts = run.state, run.restarts + 1
            self._begin()

    async def _live(self) -> None:
        """All containers, in their order; nothing of it is told from here."""
        policy = self.manifest["spec"].get("restartPolicy", "Always")
        await self._prepare()
        for run in self._init:
            if await self._keep(run, "Never" if policy == "Never" else "OnFailure"):
                self._become("Failed")
                return
        self._initialized = True
        codes = await asyncio.gather(*(self._keep(run, policy) for run in self._main))
        self._become("Failed" if any(codes) else "Succeeded")

    async def _prepare(self) -> None:
        """Folders and volumes, again until each source is there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "hosts").write_text(self._host.hosts(self.manifest, self.address))
        lookup = self._host.lookup(self.manifest["metadata"]["namespace"])
        while True:
            try:
                await self._host.call(
                    lambda: volumes.prepare(
                        self.manifest,
                        self._folder / "volumes",
                        lookup=lookup,
                        account=lambda: self._host.account(self.manifest),
                    )
                )
            except (ConfigError, ApiError, OSError) as error:
                self._extra["message"] = str(error)
                self._changed.set()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self._extra.pop("message", None)
                return

    async def _keep(self, run: Run, policy: str) -> int:
        """Run it, again where the policy says so; the exit code of the last."""
        while True:
            await self._pull(run)
            container = await self._start(run)
            ended = await container.ended()
            run.state = status.terminated(ended, status.container_id(self.uid, run))
            self._changed.set()
            if not status.restarts(policy, ended.code):
                return ended.code
            pause = BACKOFF_SECONDS[min(run.restarts, len(BACKOFF_SECONDS) - 1)]
            run.last = run.state
            if pause:
                run.state = {"waiting": {"reason": "CrashLoopBackOff"}}
                await asyncio.sleep(pause)
            run.restarts += 1

    async def _pull(self, run: Run) -> None:
        while True:
            listed = "initContainers" if run in self._init else "containers"
            run.manifest = next(
                each
                for each in self.manifest["spec"][listed]
                if each["name"] == run.manifest["name"]
            )
            error = pull_error(run.manifest["image"])
            if error is None:
                return
            reason, message = error
            if run.state.get("waiting", {}).get("reason") == reason == "ErrImagePull":
                reason = "ImagePullBackOff"
                message = f'Back-off pulling image "{run.manifest["image"]}"'
            run.state = {"waiting": {"reason": reason, "message": message}}
            self._changed.set()
            await asyncio.sleep(RETRY_SECONDS)

    async def _start(self, run: Run) -> Container:
        """Returns once it runs; one that cannot has ended by then."""
        while True:
            container = Container()
            try:
                if self._is_simulated(run):
                    container.simulate()
                else:
                    plan = await self._host.call(
                        lambda: plan_of(
                            self.manifest,
                            run.manifest,
                            host=self._host,
                            folder=self._folder,
                            address=self.address,
                        )
                    )
                    assert isinstance(plan, Plan)
                    await container.start(plan, self._folder / "containers" / run.manifest["name"])
            except (ConfigError, ApiError) as error:
                waiting = {"reason": "CreateContainerConfigError", "message": str(error)}
                run.state = {"waiting": waiting}
                self._changed.set()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._containers[run.manifest["name"]] = container
            run.state = {"running": {"startedAt": container.started}}
            if run in self._main:
                self._phase = "Running"
            self._changed.set()
            return container

    def _is_simulated(self, run: Run) -> bool:
        asked = self.manifest["metadata"].get("annotations") or {}
        return words.SIMULATE in asked or run.manifest["image"] == words.SIMULATED

    async def _obey(self) -> None:
        """What a test asks for by annotation, once."""
        asked = self.manifest["metadata"].get("annotations") or {}
        first = self._containers.get(self._main[0].manifest["name"])
        if first and (text := self._fresh(asked, words.EXIT)):
            how = json.loads(text)
            first.end(how["exitCode"], how.get("reason", ""), how.get("message", ""))
        if text := self._fresh(asked, words.EVICT):
            disrupted = {"type": "DisruptionTarget", "status": "True"}
            await self._stop()
            self._extra = {
                "reason": "Evicted",
                "message": text,
                "conditions": [{**disrupted, "reason": "TerminationByKubelet", "message": text}],
            }
            self._become("Failed")

    def _fresh(self, asked: Mapping[str, str], name: str) -> str:
        text = asked.get(name, "")
        if not text or f"{name}={text}" in self._obeyed:
            return ""
        self._obeyed.add(f"{name}={text}")
        return text

    async def _stop(self) -> None:
        """SIGTERM, the grace that its object gives, SIGKILL; no container starts any more."""
        if self._living:
            self._living.cancel()
        running = [each for each in self._containers.values() if each.running]
        for container in running:
            container.terminate()
        ends: asyncio.Future[list[object]] = asyncio.gather(*(each.ended() for each in running))
        deadline = asyncio.get_running_loop().time() + self._grace()
        while running and not ends.done():
            left = deadline - asyncio.get_running_loop().time()
            if self._gone or left <= 0:
                for container in running:
                    container.kill()
                await ends
                break
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait((ends, changed), timeout=left, return_when=FIRST_COMPLETED)
            changed.cancel()
            self._changed.clear()
        await self._see_ends()
        if self._phase == "Running":
            codes = [run.state.get("terminated", {}).get("exitCode", 0) for run in self._main]
            self._become("Failed" if any(codes) else "Succeeded")

    async def _see_ends(self) -> None:
        """Of the containers that have been ended from outside `_live`."""
        for run in self._main:
            last = self._containers.get(run.manifest["name"])
            if run.running and last is not None:
                ended = await last.ended()
                run.state = status.terminated(ended, status.container_id(self.uid, run))

    def _grace(self) -> float:
        seconds = self.manifest["metadata"].get("deletionGracePeriodSeconds")
        if seconds is None:
            seconds = self.manifest["spec"].get("terminationGracePeriodSeconds", 30)
        return float(seconds)

    def _become(self, phase: str) -> None:
        self._phase = phase
        self._changed.set()

    async def _tell(self) -> None:
        """Write the status, where it is another than the last."""
        found = status.pod_status(
            uid=self.uid, phase=self._phase, address=self.address, started=self._started,
            init=self._init, main=self._main, initialized=self._initialized, extra=self._extra,
        )  # fmt: skip
        for condition in found["conditions"]:
            kind, holds = condition["type"], condition["status"]
            if self._since.get(kind, ("", ""))[0] != holds:
                self._since[kind] = (holds, now())
            condition["lastTransitionTime"] = self._since[kind][1]
        if found == self._told:
            return
        try:
            await self._host.write_status(self.manifest, found)
            self._told = found
        except ApiError as error:
            if error.code != 404:  # its deletion is on its way
                _LOG.warning("status of %s: %s", self.manifest["metadata"]["name"], error)
                self._again()
        except (HTTPError, OSError) as error:
            _LOG.warning("status of %s: %s", self.manifest["metadata"]["name"], error)
            self._again()

    def _again(self) -> None:
        asyncio.get_running_loop().call_later(RETRY_SECONDS, self._changed.set)

    async def _leave(self) -> bool:
        """Tell how it ended and remove the object; whether that is done."""
        if self._host.quiet(self.manifest["spec"]["nodeName"]):
            return False
        await self._tell()
        try:
            await self._host.confirm_deletion(self.manifest)
        except (ApiError, HTTPError, OSError) as error:
            _LOG.warning("deletion of %s: %s", self.manifest["metadata"]["name"], error)
            return False
        return True

    def _clean(self) -> None:
        """Memory goes with this process's mounts, and must not be emptied through them."""
        for path in (self._folder / "volumes").glob("*"):
            with contextlib.suppress(OSError):
                volumes.release(path)
        shutil.rmtree(self._folder, ignore_errors=True)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _LOG.error("a pod's containers are no longer watched", exc_info=error)

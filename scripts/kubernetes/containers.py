"""One run of a container: a sandbox, its limits, how it ended."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from scripts.kubernetes import sandbox
from scripts.kubernetes.quantities import amount

Object = dict[str, Any]
TEMPORARY = "/run/tmp"
"""A folder of each run's own. /tmp is this machine's: a test's scripts and files are there."""
MESSAGE_BYTES = 4096
"""Of a termination message, as the kubelet has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All that one run needs."""

    name: str
    """Unique on the node; of folders and cgroups."""
    hostname: str
    """The pod's."""
    command: list[str]
    """Program and arguments."""
    environ: dict[str, str]
    """All of it."""
    cwd: str
    """Working folder; made where missing."""
    binds: list[Object]
    """As volumes.binds has them."""
    shm_bytes: int
    """Of /dev/shm, where nothing is bound there."""
    memory_bytes: int | None
    """Limit."""
    message_path: str
    """terminationMessagePath."""
    log: Path
    """What it prints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended."""

    code: int
    """As container runtimes tell: 128 and the signal's number."""
    reason: str
    """Completed, Error, OOMKilled, StartError."""
    message: str
    """What it left in its termination message, or why it could not start."""
    started: str
    """Time, RFC 3339."""
    finished: str
    """Time, RFC 3339."""


class Container:
    """A process of its own, or, where it is only simulated, none."""

    def __init__(self) -> None:
        self.started = now()
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._told: Ended | None = None
        self._waiting: asyncio.Task[None] | None = None

    async def start(self, plan: Plan, folder: Path) -> None:
        """Returns once the command runs, or has failed to."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "root").mkdir(exist_ok=True)
        shutil.rmtree(folder / "tmp", ignore_errors=True)
        (folder / "tmp").mkdir()
        message = folder / "message"
        message.write_bytes(b"")
        group = _memory_group(plan)
        reading, writing = os.pipe()
        spec = {
            "root": str(folder / "root"),
            "hostname": plan.hostname[:63],
            "command": plan.command,
            "environ": plan.environ,
            "cwd": plan.cwd,
            "shm_bytes": plan.shm_bytes,
            "binds": [
                *plan.binds,
                {"source": str(folder / "tmp"), "target": TEMPORARY, "read_only": False},
                {"source": str(message), "target": plan.message_path, "read_only": False},
            ],
            "cgroups": [str(group)] if group else [],
            "refusal": writing,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        (folder / "spec.json").chmod(0o600)
        with plan.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", sandbox.__file__, str(folder / "spec.json"),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=(writing,), start_new_session=True,
            )  # fmt: skip
        os.close(writing)
        refusal = await _read_all(reading)
        self._waiting = asyncio.create_task(self._wait(refusal, message, group))

    def simulate(self) -> None:
        """Run without a process."""

    def end(self, code: int, reason: str = "", message: str = "") -> None:
        """End it now, and let that be how it ended."""
        self._told = Ended(
            code=code,
            reason=reason or ("Error" if code else "Completed"),
            message=message,
            started=self.started,
            finished=now(),
        )
        if self._process:
            self.kill()
        elif not self._ended.done():
            self._ended.set_result(self._told)

    def terminate(self) -> None:
        """SIGTERM; a simulated one ends at once."""
        if self._process:
            self._signal(signal.SIGTERM)
        else:
            self.end(143)

    def kill(self) -> None:
        """SIGKILL, for all its processes."""
        if self._process:
            self._signal(signal.SIGKILL)
        else:
            self.end(137)

    def freeze(self, *, still: bool) -> None:
        """Stop all its processes, or have them go on."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            sandbox_process = psutil.Process(self._process.pid)
            stopped: set[int] = set()
            # Again, until a round finds nobody who was started while the last one went on.
            while found := {
                each for each in sandbox_process.children(recursive=True) if each.pid not in stopped
            }:
                stopped |= {each.pid for each in found}
                for each in found:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGSTOP if still else signal.SIGCONT)

    async def ended(self) -> Ended:
        """Wait for that."""
        return await asyncio.shield(self._ended)

    @property
    def running(self) -> bool:
        """Has not ended."""
        return not self._ended.done()

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _wait(self, refusal: bytes, message: Path, group: Path | None) -> None:
        assert self._process is not None
        code = await self._process.wait()
        text = message.read_bytes()[-MESSAGE_BYTES:].decode(errors="replace")
        reason = "Error" if code else "Completed"
        if group and _killed_for_memory(group):
            reason = "OOMKilled"
        if refusal:
            reason, text = "StartError", refusal.decode(errors="replace")
        found = Ended(
            code=128 - code if code < 0 else code,
            reason=reason,
            message=text,
            started=self.started,
            finished=now(),
        )
        if group:
            await _remove_group(group)
        if not self._ended.done():
            self._ended.set_result(self._told or found)


def now() -> str:
    """As the API writes times."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def memory_limit(container: Object) -> int | None:
    """In bytes, where there is one."""
    limit = (container.get("resources", {}).get("limits") or {}).get("memory")
    return int(amount(limit)) if limit else None


async def _read_all(reading: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
    )
    try:
        return await reader.read()
    finally:
        transport.close()


def _own_group() -> Path | None:
    """Where this process may make memory cgroups: version 1, or 2 where that is handed to us."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
        if number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / path.lstrip("/")
    return None


def _memory_group(plan: Plan) -> Path | None:
    """A cgroup with the plan's limit; None where it has none, or this machine lets us make none."""
    own = _own_group()
    if plan.memory_bytes is None or own is None:
        return None
    group = own / f"elastic-{plan.name}"
    try:
        group.mkdir(exist_ok=True)
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (group / name).exists():
                (group / name).write_text(str(plan.memory_bytes))
                return group
        group.rmdir()
    except OSError:
        return None
    return None


def can_limit_memory() -> bool:
    """Whether memory limits hold on this machine."""
    own = _own_group()
    if own is None:
        return False
    probe = own / f"elastic-probe-{os.getpid()}"
    try:
        probe.mkdir()
        holds = (probe / "memory.limit_in_bytes").exists() or (probe / "memory.max").exists()
        probe.rmdir()
    except OSError:
        return False
    return holds


def _killed_for_memory(group: Path) -> bool:
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            counts = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(counts.get("oom_kill", "0")) > 0
    return False


async def _remove_group(group: Path) -> None:
    """Its last processes leave it a moment after the first has been reaped."""
    for _ in range(100):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            await asyncio.sleep(0.02)
        else:
            return

"""The least of an agent: a child subreaper that starts processes and says how they ended.

`SmallAgent` is the tests' end; run as a program, this file is the agent, in a process of its own,
since what a subreaper adopts must not get mixed up with pytest's children. Both speak JSON lines.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STARTUP = str(ROOT / "elastic" / "agent" / "startup")
DEADLINE = 150.0


class SmallAgent:
    """Starts the agent, and asks it. What it answers are plain dictionaries."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=base_environment() | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the agent died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def start(self, starter: str, **spec: Any) -> dict[str, Any]:
        """Run one process to its end: exit, stdout, stderr, link, progress, and seconds."""
        return self.ask(verb="start", starter=starter, spec=rank_spec(**spec))

    def launch(self, starter: str, **environ: str) -> dict[str, Any]:
        variables = base_environment() | {"PYTHONPATH": STARTUP} | environ
        return self.ask(verb="launch", starter=starter, environ=variables)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def base_environment() -> dict[str, str]:
    """Ours, without what would reach into a rank."""
    drop = ("PYTEST_", "ELASTIC_", "COV_", "PYTHONPATH", "OMP_NUM_THREADS", "PYTHONWARNINGS")
    return {name: value for name, value in os.environ.items() if not name.startswith(drop)}


def rank_spec(**spec: Any) -> dict[str, Any]:
    """A spec with what every rank has."""
    environ = base_environment() | {
        "PYTHONPATH": STARTUP,
        "ELASTIC_MARK": "job/node-0/3",
        "ELASTIC_JOB": "1f0c2a9b",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    environ |= spec.pop("environ", {})
    environ = {name: value for name, value in environ.items() if value is not None}
    return {"kind": "script", "environ": environ, "cwd": "/tmp", "python": sys.executable} | spec


# --- the agent itself ---


async def _main() -> None:
    from elastic.agent import prctl
    from elastic.agent.starters.starter import Starter

    prctl.set_child_subreaper()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    starters: dict[str, Starter] = {}
    while line := await reader.readline():
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(DEADLINE):
                answer = await _handle(request, starters)
        except Exception as error:  # noqa: BLE001 - it is the tests' to judge
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


async def _handle(request: dict[str, Any], starters: dict[str, Any]) -> dict[str, Any]:
    from elastic.agent.starters.starter import Starter

    name = request["starter"]
    match request["verb"]:
        case "launch":
            before = time.monotonic()
            starter = await Starter.launch(name, environ=request["environ"], cwd="/tmp")
            starters[name] = starter
            ready = await starter.ready()
            return {
                "seconds": time.monotonic() - before,
                "said": ready.seconds,
                "threads": ready.threads,
                "pid": starter.pid,
            }
        case "start":
            return await _start(request, starters[name])
        case "preload":
            found = await starters[name].preload(request["modules"])
            return {"loaded": found.loaded, "refused": found.refused, "seconds": found.seconds}
        case "store":
            return await _store(request, starters[name], starters["spawner"])
        case "start_dying":
            return await _start_dying(request, starters[name])
        case "die":
            os.kill(starters[name].pid, signal.SIGKILL)
            await starters[name].died.wait()
            return {}
    raise ValueError(request["verb"])


async def _start(request: dict[str, Any], starter: Any) -> dict[str, Any]:
    from elastic.agent.starters.spec import StartSpec
    from elastic.proto import link, page

    spec = StartSpec.from_json(json.dumps(request["spec"]).encode())
    out, err = os.memfd_create("out"), os.memfd_create("err")
    progress = page.create()
    ours, theirs = socket.socketpair()
    before = time.monotonic_ns()
    fds = {"stdout": out, "stderr": err, "page": progress, "link": theirs.fileno()}
    pid = await starter.start(spec, fds)
    started = time.monotonic_ns()
    theirs.close()
    watching = asyncio.create_task(_exit(pid))
    messages = await _read_link(ours, link.Parser(), request.get("answer", ""))
    return {
        "pid": pid,
        "began_ns": before,
        "started_ns": started,
        "exit": await watching,
        "stdout": _text(out),
        "stderr": _text(err),
        "link": messages,
        "progress": _plain(page.read(page.open_page(progress))),
    }


async def _store(request: dict[str, Any], starter: Any, spawner: Any) -> dict[str, Any]:
    """A store, a script that uses it (its port as an argument), and the store's end."""
    from elastic.agent.ports import listen
    from elastic.agent.starters.spec import StartSpec

    listener = listen(request["host"])
    host, port = listener.getsockname()[:2]
    read, write = os.pipe()
    before = time.monotonic()
    spec = rank_spec(kind="store", target=host)
    pid = await starter.start(
        StartSpec.from_json(json.dumps(spec).encode()), {"listen": listener.fileno(), "link": write}
    )
    listener.close()
    os.close(write)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read)
    )
    said = await reader.readline()
    seconds = time.monotonic() - before
    client = rank_spec(target=request["client"], args=[host, str(port)])
    used = await _start({"spec": client}, spawner)
    os.kill(pid, signal.SIGTERM)
    return {"said": said.decode(), "seconds": seconds, "exit": await _exit(pid), "used": used}


async def _start_dying(request: dict[str, Any], starter: Any) -> dict[str, Any]:
    """Kill the starter with a dozen starts under way: each is answered, one way or the other."""
    from elastic.agent.starters.spec import StartSpec

    spec = StartSpec.from_json(json.dumps(request["spec"]).encode())
    before = _children()
    starts = [asyncio.create_task(starter.start(spec, {})) for _ in range(12)]
    await starts[0]
    os.kill(starter.pid, signal.SIGKILL)
    results = await asyncio.gather(*starts, return_exceptions=True)
    pids = sorted(result for result in results if isinstance(result, int))
    children = _children() - before
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    exits = [await _exit(pid) for pid in pids]
    failures = sorted({type(result).__name__ for result in results if not isinstance(result, int)})
    return {"pids": pids, "children": sorted(children), "exits": exits, "failures": failures}


def _children() -> set[int]:
    """Our children, but for those that have ended: a dead starter leaves intermediates to reap."""
    found = set()
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state != "Z":
            found.add(int(pid))
    return found


async def _exit(pid: int) -> int:
    pidfd = os.pidfd_open(pid)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 - it has ended
    return os.waitstatus_to_exitcode(status)


async def _read_link(end: socket.socket, parser: Any, answer: str) -> list[dict[str, Any]]:
    """All messages until the rank's last process has closed its end."""
    from elastic.proto import link

    reader, writer = await asyncio.open_connection(sock=end)
    messages = []
    with contextlib.suppress(ConnectionResetError):
        while data := await reader.read(1 << 16):
            for message in parser.feed(data):
                messages.append({"kind": type(message).__name__} | _plain(message))
                if isinstance(message, link.UnitAsked):
                    writer.write(link.encode(link.UnitAnswered(reason=answer)))
    writer.close()
    return messages


def _plain(value: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(value)


def _text(fd: int) -> str:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read().decode(errors="replace")


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # no longer than pytest
    asyncio.run(_main())

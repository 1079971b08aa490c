"""An agent's starters and nothing else; run by test_keeping_starters.py in a process of its own, since
a subreaper adopts whatever comes. Says what it saw as lines of JSON."""

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path

from elastic.agent import children, prctl
from elastic.agent.environment import common_environment
from elastic.agent.settings import AgentSettings
from elastic.agent.starters import kept, starters
from elastic.agent.starters.spec import StartSpec
from tests.agent.starters.spares_program import settings

DEADLINE = 150.0
THREAD = """\
import threading, time
threading.Thread(target=time.sleep, args=[999], daemon=True).start()
"""
starters.START_TIMEOUT = 0.5


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def run(own: starters.Starters, **environ: str) -> str:
    """Start a script that does nothing; returns who did."""
    work = settings(Path("/dev/null")).workload
    spec = StartSpec(
        kind="script", target="/dev/null", args=(), environ={**work.environ, **environ}, cwd="/",
        python=sys.executable,
    )  # fmt: skip
    kind, pid = await own.start(spec, {"stdout": 2, "stderr": 2})
    await children.watch(pid)
    return kind


async def with_standby(node: AgentSettings) -> tuple[starters.Starters, int]:
    own = starters.Starters(node)
    own.note_torch(0, 1, node.workload.environ, node.workload.environ)
    own.build()
    await own.standby_ready.wait()
    (standby,) = own.pids
    return own, standby


async def momentary(node: AgentSettings) -> list[object]:
    """The standby has no descriptor left, for a moment."""
    own, standby = await with_standby(node)
    limits = resource.prlimit(standby, resource.RLIMIT_NOFILE)
    resource.prlimit(standby, resource.RLIMIT_NOFILE, (3, limits[1]))
    seen: list[object] = [await run(own)]
    resource.prlimit(standby, resource.RLIMIT_NOFILE, limits)
    return [*seen, await run(own), own.reason]


async def lasting(node: AgentSettings) -> list[object]:
    """What the standby was made for is not what is asked of it: it is no use any more."""
    own, standby = await with_standby(node)
    ended = os.pidfd_open(standby)
    seen: list[object] = [await run(own, PYTHONHASHSEED="1")]
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(ended, gone.set)
    await gone.wait()
    own.build()
    seen += [await run(own), "PYTHONHASHSEED" in own.reason, own.standby_ready.is_set()]
    await own.nursery_ready.wait()
    return [*seen, await store(own), standby in own.pids, len(own.pids)]


async def store(own: starters.Starters) -> str:
    """Start a store and see it serve; returns who did."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready, told = os.pipe()
    spec = StartSpec(
        kind="store", target="127.0.0.1", args=(), environ=dict(os.environ), cwd="/",
        python=sys.executable,
    )  # fmt: skip
    kind, pid = await own.start(spec, {"listen": listener.fileno(), "link": told})
    os.close(told)
    said = asyncio.Event()
    asyncio.get_running_loop().add_reader(ready, said.set)
    await said.wait()
    assert os.read(ready, 6) == b"ready\n"
    os.kill(pid, signal.SIGKILL)
    await children.watch(pid)
    return kind


async def nursery(node: AgentSettings) -> list[object]:
    """Ranks are spawned by request, and stores forked as soon as there is, or will be, what forks them."""
    own = starters.Starters(replace(node, rank_start="spawn"))
    seen: list[object] = [await store(own), own.forks_stores]
    own.note_modules(())
    while len(own.pids) < 2:
        await asyncio.sleep(0)
    seen += [own.forks_stores, await store(own), own.forks_stores, await run(own)]
    (victim,) = own.pids - {spawner(own)}
    os.kill(victim, signal.SIGKILL)
    while own.nursery_ready.is_set():
        await asyncio.sleep(0)
    return [*seen, own.forks_stores, await store(own)]


async def building(node: AgentSettings, **environ: str) -> tuple[starters.Starters, int]:
    """A nursery that is being built, and its pid."""
    work = replace(node.workload, environ={**node.workload.environ, **environ})
    own = starters.Starters(replace(node, workload=work, rank_start="spawn"))
    own.build()
    while not own.pids:
        await asyncio.sleep(0)
    (found,) = own.pids
    return own, found


async def late(node: AgentSettings) -> list[object]:
    """A nursery that is never ready is waited for once, and not anew by each store."""
    kept.BUILD_TIMEOUT = 0.5
    own, stopped = await building(node)
    os.kill(stopped, signal.SIGSTOP)
    seen: list[object] = [await store(own)]
    kept.BUILD_TIMEOUT = 10 * DEADLINE
    seen += [await store(own), stopped in own.pids]
    os.kill(stopped, signal.SIGCONT)
    await own.nursery_ready.wait()
    return [*seen, await store(own)]


async def threads(node: AgentSettings) -> list[object]:
    """A nursery in which something has started a thread is no use, and nobody waits for it longer."""
    kept.BUILD_TIMEOUT = 10 * DEADLINE
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(THREAD)
        path = os.pathsep.join((folder, node.workload.environ.get("PYTHONPATH", "")))
        own, nursery = await building(node, PYTHONPATH=path)
        return [await store(own), nursery in own.pids]


async def mortal(node: AgentSettings) -> list[object]:
    """A nursery that dies as often as it is built is built three times, and waited for no longer."""
    kept.BUILD_TIMEOUT = 10 * DEADLINE
    own, _ = await building(node)
    return await killing(own, "nursery", store(own))


async def mortal_standby(node: AgentSettings) -> list[object]:
    """And so is a standby from which all ranks are to be forked, however long each takes to die."""
    kept.LONG_TIMEOUT, kept.QUICK = 10 * DEADLINE, 0.0
    own = starters.Starters(replace(node, rank_start="fork"))
    own.prepare()
    forkable = asyncio.get_running_loop().create_task(own.forkable())
    seen = await killing(own, "standby", run(own))
    await forkable
    return [*seen, own.reason]


async def killing(
    own: starters.Starters, kind: str, start: Coroutine[None, None, str]
) -> list[object]:
    """Who starts something where each of that kind is killed before it is ready, and how many were."""
    asked = asyncio.get_running_loop().create_task(start)
    killed = set[int]()
    while not asked.done():
        for victim in own.pids - killed:
            if f"elastic.agent.starters.{kind}" in Path(f"/proc/{victim}/cmdline").read_text():
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
        await asyncio.sleep(0)
    return [await asked, len(killed)]


async def long(node: AgentSettings) -> list[object]:
    """A standby from which all ranks are to be forked is waited for longer, and that is said; not for ever."""
    kept.BUILD_TIMEOUT, kept.LONG_TIMEOUT = 0.1, 10 * DEADLINE
    said = list[str]()
    heard = logging.Handler()
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastic.agent.starters.kept").addHandler(heard)
    own = starters.Starters(replace(node, rank_start="fork"))
    own.prepare()
    while not own.pids:
        await asyncio.sleep(0)
    (stopped,) = own.pids
    os.kill(stopped, signal.SIGSTOP)
    asked = asyncio.get_running_loop().create_task(run(own, **common_environment(node)))
    while not said:
        await asyncio.sleep(0.01)
    seen: list[object] = [said[0], asked.done()]
    os.kill(stopped, signal.SIGCONT)
    return [*seen, await asked]


def spawner(own: starters.Starters) -> int:
    """Its pid: the only one that has not imported torch."""
    (found,) = [p for p in own.pids if "torch" not in Path(f"/proc/{p}/maps").read_text()]
    return found


async def stuck(node: AgentSettings) -> list[object]:
    """Another spawner takes the place of one that SIGKILL does not end."""
    own = starters.Starters(node)
    seen: list[object] = [await run(own)]
    (first,) = own.pids
    say(first)
    sys.stdin.readline()  # by now it is frozen
    return [*seen, await run(own), first in own.pids]


async def reaped(node: AgentSettings) -> list[object]:
    """Nobody wants a process any more that was started, and it is reaped before that is known."""
    own = starters.Starters(node)
    await run(own)
    known = own.pids
    asked = asyncio.get_running_loop().create_task(run(own))
    await asyncio.sleep(0)  # the spawner has been asked, and nothing of its answer is read
    asked.cancel()
    while not (found := children.orphans(known)):
        pass
    os.kill(found[0], signal.SIGKILL)
    os.waitpid(found[0], 0)  # noqa: ASYNC222 - a moment, in which nothing else may run
    return [await run(own)]


CASES: dict[str, Callable[[AgentSettings], Awaitable[list[object]]]] = {
    case.__name__: case
    for case in (
        momentary,
        lasting,
        stuck,
        reaped,
        nursery,
        late,
        threads,
        mortal,
        mortal_standby,
        long,
    )
}


async def main(case: str) -> list[object]:
    prctl.set_child_subreaper()
    mishaps: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: mishaps.append(str(context["exception"])))
    node = replace(settings(Path("/dev/null")), kill_timeout=0.5)
    return await CASES[case](node) + mishaps


if __name__ == "__main__":
    seen = asyncio.run(asyncio.wait_for(main(sys.argv[1]), DEADLINE))
    say(seen)

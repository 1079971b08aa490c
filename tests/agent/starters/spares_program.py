"""An agent with spares and nothing else; run by test_spares.py in a process of its own, since a
subreaper adopts whatever comes. Prints what it saw as JSON."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from elastic.agent import children, hook, prctl
from elastic.agent.settings import AgentSettings, LogSettings, Workload
from elastic.agent.starters.gpus import Gpus
from elastic.agent.starters.spares import MOST_SECONDS, NEEDS, Spares
from elastic.agent.starters.spec import StartSpec
from elastic.agent.starters.starters import Starters
from elastic.proto import slot
from elastic.proto.link import ModulesNote
from elastic.proto.security import Security

ROOT = str(Path(__file__).parents[3])
DEADLINE = 240.0
SLOT_BYTES = (40 << 20) + slot.PAGE
"""Of three parts, which are registered one by one."""


def settings(script: Path) -> AgentSettings:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{script.parent}"}
    work = Workload(
        kind="script", entry=str(script), python=sys.executable, environ=environ, cwd="/"
    )
    return AgentSettings(
        run_id="job",
        node_id="node",
        slots=1,
        master="",
        host="127.0.0.1",
        workload=work,
        logs=LogSettings(run_dir=None),
        security=Security(),
    )


async def ready(spares: Spares) -> None:
    while not spares.complete(1):
        await asyncio.sleep(0.01)


def touched_slot() -> int:
    fd = slot.create(SLOT_BYTES)
    os.posix_fallocate(fd, 0, SLOT_BYTES)
    return fd


async def shown(spares: Spares, slots: list[int]) -> int:
    """How many slots the spare has mapped once it has registered these."""
    (spare,) = spares._spares.values()
    spares.show({0: slots})
    while not spare.registered:
        await asyncio.sleep(0.01)
    maps = Path(f"/proc/{spare.pid}/maps").read_text()
    return len({line.split()[4] for line in maps.splitlines() if "elastic-slot" in line})


async def known_until(done: asyncio.Task[None], spares: Spares, pid: int) -> bool:
    """A sweep at no moment takes it for an orphan."""
    known = pid in spares.pids
    while not done.done():
        await asyncio.sleep(0)
        known = known and pid in spares.pids
    await done
    return known


async def after(node: AgentSettings, starters: Starters, name: str, *, late: bool = False) -> bool:
    """Whether a spare gets ready once another did not, for what it had to rehearse."""
    spares = Spares(node, starters)
    environ = dict(node.workload.environ)
    told = ModulesNote(modules=(), environ=environ, rehearsal=(f"rehearsed:{name}", ""))
    spares.note(0, environ, told)
    await spares.fork(0, "cpu")
    loop = asyncio.get_running_loop()
    clock = loop.time
    if late:
        while not (Path(node.workload.entry).parent / "hangs").exists():
            await asyncio.sleep(0.01)
        loop.time = lambda: clock() + MOST_SECONDS  # type: ignore[method-assign]
    while spares.pids:
        await asyncio.sleep(0.01)
    loop.time = clock  # type: ignore[method-assign]
    await spares.fork(0, "cpu")
    await ready(spares)
    found = spares.complete(1)
    spares.kill()
    return found


async def killed(node: AgentSettings, starters: Starters) -> bool:
    """Whether a spare that rehearses ends, silently, with its agent."""
    hangs = Path(node.workload.entry).parent / "hangs"
    hangs.unlink()
    spares, environ = Spares(node, starters), dict(node.workload.environ)
    told = ModulesNote(modules=(), environ=environ, rehearsal=("rehearsed:hangs", ""))
    spares.note(0, environ, told)
    await spares.fork(0, "cpu")
    (spare,) = spares._spares.values()
    while not hangs.exists():
        await asyncio.sleep(0.01)
    spares.kill()
    return await spare.ended == -signal.SIGKILL


class Busy(Gpus):
    """One device, with room, whose driver answers once it is let."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked, self.answers = asyncio.Event(), asyncio.Event()

    async def used_by(self, pids: Collection[int]) -> dict[int, tuple[int, int]]:
        return {pid: (0, 1) for pid in pids}

    async def free(self) -> list[int]:
        self.asked.set()
        await self.answers.wait()
        return [2 * NEEDS]


async def forked(node: AgentSettings, starters: Starters, *, round_ends: bool) -> bool:
    """Whether a look forks a spare, where the driver is long in answering."""
    spares, gpus, pids = Spares(node, starters), Busy(), {0: os.getpid()}
    spares._gpus = gpus
    looking = asyncio.create_task(spares.look(pids.copy))
    await gpus.asked.wait()
    if round_ends:
        pids.clear()
    gpus.answers.set()
    await looking
    found = bool(spares.pids)
    spares.kill()
    while spares.pids:
        await asyncio.sleep(0.01)
    return found


async def main(script: Path) -> dict[str, object]:
    prctl.set_child_subreaper()
    node = settings(script)
    starters = Starters(node)
    spares = Spares(node, starters)
    starters.note_torch(0, 1, node.workload.environ, node.workload.environ)
    told = ModulesNote(
        modules=(), environ=dict(node.workload.environ), rehearsal=("rehearsed:act", "what")
    )
    spares.note(0, node.workload.environ, told)
    late = ("leaves_thread", "leaves_thread_and_reads_rank")
    starters.note_modules((*late, hook.COMPILER))
    await starters.standby_ready.wait()
    seen: dict[str, object] = {}
    while not spares.pids:  # it imports these first
        await spares.fork(0, "cpu")
        await asyncio.sleep(0.01)
    await ready(spares)
    seen["forked where the driver is slow"] = [
        await forked(node, starters, round_ends=ends) for ends in (False, True)
    ]
    seen["after one that hung"] = await after(node, starters, "hangs", late=True)
    seen["killed in its rehearsal"] = await killed(node, starters)
    seen["after one that died"] = await after(node, starters, "dies")
    (waiting,) = spares.pids
    os.kill(waiting, signal.SIGKILL)
    while spares.pids:
        await asyncio.sleep(0.01)
    seen["taken after its death"] = spares.take(0) is not None
    environ = {**node.workload.environ, "RANK": "3", "SEEN": "by the rank"}
    spec = StartSpec(
        kind="script", target=str(script), args=("x",), environ=environ, cwd="/",
        python=sys.executable,
    )  # fmt: skip
    await spares.fork(0, "cpu")
    await ready(spares)
    dying = spares.take(0)
    assert dying is not None
    os.kill(
        dying.pid, signal.SIGSTOP
    )  # as one that SIGKILL has reached, and the driver still holds
    try:
        await dying.order(spec, {"stdout": 2, "stderr": 2})
    except OSError:
        seen["took no orders"] = await dying.ended
    await spares.fork(0, "cpu")
    await ready(spares)
    kept, dropped = touched_slot(), touched_slot()
    seen["registered"] = [
        await shown(spares, [kept, dropped]),
        await shown(spares, [kept]),
    ]
    os.close(dropped)
    environ["SLOT"] = f"/proc/{os.getpid()}/fd/{kept}"
    spec = replace(spec, environ=environ)
    spare = spares.take(0)
    assert spare is not None
    orders = asyncio.create_task(spare.order(spec, {"stdout": 2, "stderr": 2}))
    seen["known while it gets its orders"] = await known_until(orders, spares, spare.pid)
    seen["exit"] = await spare.ended
    seen["pid"] = spare.pid
    await spares.fork(0, "cpu")
    await ready(spares)
    (last,) = spares.pids
    for code in (-signal.SIGKILL, -signal.SIGTERM, 0):  # killed, or in order
        spares.judge("spare", code)
    spares.judge("standby", -signal.SIGSEGV)
    seen["kept"] = last in spares.pids
    seen["given back"] = [await shown(spares, [kept]), await shown(spares, [])]
    await shown(spares, [kept])  # which is never used
    spares.judge("spare", -signal.SIGSEGV)
    seen["given up"] = last not in spares.pids
    await spares.fork(0, "cpu")
    seen["forked again"] = bool(spares.pids)
    spares.kill()
    starters.kill()
    assert not await children.sweep(tuple, DEADLINE)
    seen["left"] = Path(f"/proc/{last}").exists()
    return seen


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    found = asyncio.run(asyncio.wait_for(main(Path(sys.argv[1])), DEADLINE))
    sys.stdout.write(json.dumps(found))

"""`-m tests.trainer.run.spared ARGUMENT ...`: an agent's spare that rehearses, and then gets orders to be the one rank of
`rehearsed.py`. Ends as that rank does."""

import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

import torch

from elastic.agent import children, prctl
from elastic.agent.starters.spares import Spares
from elastic.agent.starters.spec import StartSpec
from elastic.agent.starters.starters import Starters
from elastic.proto.link import ModulesNote
from elastic.trainer.arguments.parse import parse
from elastic.trainer.run import rehearsal
from tests.agent.starters.spares_program import DEADLINE, ROOT, ready, settings

ENVIRON = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip


async def main(arguments: list[str]) -> int:
    prctl.set_child_subreaper()
    node = settings(Path(__file__))
    node = replace(node, workload=replace(node.workload, cwd=ROOT))
    environ = {**node.workload.environ, **ENVIRON}
    starters = Starters(node)
    spares = Spares(node, starters)
    starters.note_torch(0, 1, node.workload.environ, node.workload.environ)
    torch.set_num_threads(1)  # as the rank has
    told = ("elastic.trainer.run.rehearsal:rehearse", rehearsal.argument(parse(arguments)))
    spares.note(0, environ, ModulesNote(modules=(), environ=environ, rehearsal=told))
    await starters.standby_ready.wait()
    while not spares.pids:
        await spares.fork(0, "cpu")
    await ready(spares)
    spare = spares.take(0)
    assert spare is not None
    spec = StartSpec(
        kind="module", target="tests.trainer.run.rehearsed", args=tuple(arguments), environ=environ,
        cwd=ROOT, python=sys.executable,
    )  # fmt: skip
    await spare.order(spec, {"stdout": 1, "stderr": 2})
    status = await spare.ended
    starters.kill()
    assert not await children.sweep(tuple, DEADLINE)
    return status


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(asyncio.run(asyncio.wait_for(main(sys.argv[1:]), DEADLINE)))

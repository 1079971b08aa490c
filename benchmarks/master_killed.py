"""The master is killed while ranks train: until the next one has its node back and answers.

No peer has a master that may die: torchrun's agents lose their store with it, and the job.
"""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample
from elastic.proto import job_folder
from elastic.proto.calls import MasterClient
from elastic.proto.errors import ElasticError
from elastic.proto.security import Security

START_S = 60.0
BACK_S = 30.0
SETTLE_S = (0.2, 1.5)


def rows(ours: Launcher, n: int) -> list[Row]:
    """`n` deaths in a row, of one job."""
    sample, rng = Sample(launcher=ours.name), random.Random(0)
    while sample.tries < n:
        with Job() as job:
            why = _start(job, ours)
            while why is None and sample.tries < n:
                time.sleep(rng.uniform(*SETTLE_S))
                why = _kill(job, sample)
            if why is not None:
                sample.fail(why)
    return [Row(measure="SIGKILL of the master to the next one's word", ours=sample, peers=[])]


def _start(job: Job, launcher: Launcher) -> str | None:
    job.launch(
        launcher,
        ["--standalone", "--nproc_per_node=2", f"--log-dir={job.out}", str(SCRIPTS / "steps.py")],
    )
    return job.until(lambda: len(job.pids()) == 2 and job.events()[-1].kind == "step", START_S)


def _kill(job: Job, sample: Sample) -> str | None:
    """Kill it; None, or what went wrong: nobody came back, or a rank was touched."""
    folder, ranks = job_folder.find_newest(job.out), job.pids()
    assert folder is not None
    before = job_folder.read_note(folder)
    assert before is not None
    killed = time.monotonic()
    os.kill(before.pid, signal.SIGKILL)
    why = job.until(lambda: _serves(folder, before.pid), BACK_S)
    seconds, steps = time.monotonic() - killed, len(job.events())
    why = why or job.until(lambda: len(job.events()) > steps + 4, BACK_S)
    if why is None and job.pids() != ranks:
        why = "a rank was started again"
    if why is None:
        sample.add(seconds)
    return why


def _serves(folder: Path, before: int) -> bool:
    """Another master than `before` answers, and knows that the node trains."""
    note = job_folder.read_note(folder)
    return note is not None and note.pid != before and asyncio.run(_trains(note.address))


async def _trains(address: str) -> bool:
    async with MasterClient(address, Security()) as client:
        try:
            status = await client.status()
        except ElasticError:
            return False
    return [node.state for node in status.nodes] == ["training"]

"""A node is lost with its memory and another takes its place: what is computed twice, what storage is read
for, how long it takes. Each step is saved, and copied to the other node's memory."""

import random
import time

from benchmarks import two_nodes
from benchmarks.jobs import Job, Launcher
from benchmarks.table import Row, Sample

STEPS = 12
"""That both ranks have done before a node is lost: by then several are on storage too."""
SETTLE_S = (0.0, 3.0)
START_S = 300.0
BOUND_S = 120.0


def rows(ours: Launcher, gib: float, n: int) -> list[Row]:
    """`n` losses, each of a job of its own; gib: state of a node."""
    rng = random.Random(0)
    names = (
        "steps lost",
        "bytes read of storage",
        "to the state loaded",
        "to a step of both ranks",
    )
    units = ("steps", "bytes", "s", "s")
    samples = [Sample(launcher=ours.name, unit=unit) for unit in units]
    for _ in range(n):
        found = _once(ours, rng, gib)
        for number, sample in enumerate(samples):
            if isinstance(found, str):
                sample.fail(found)
            else:
                sample.add(found[number])
    what = f"nnodes 2, {gib:.2g} GiB a node, a third waits, one is SIGKILLed whole"
    return [
        Row(measure=f"{what}: {name}" if number == 0 else name, ours=sample, peers=[])
        for number, (name, sample) in enumerate(zip(names, samples, strict=True))
    ]


def _once(ours: Launcher, rng: random.Random, gib: float) -> tuple[float, ...] | str:
    """One loss; the figures of `rows`, or why there are none."""
    port = two_nodes.free_port()
    options = [*two_nodes.options("2", port, "node_lost.py"), f"--gib={gib}"]
    with Job() as job:

        def done(step: int) -> bool:
            ranks = {e.rank for e in job.events() if e.kind == "step" and e.step >= step}
            return len(ranks) == 2

        why = two_nodes.start(job, ours, 2, options, port)
        why = why or job.until(lambda: done(1), START_S)
        if why is None:
            # only now, or it may be in the round, and node 1 the one that waits
            job.launch(ours, options, 2)
            why = job.until(lambda: done(STEPS), START_S)
        if why is not None:
            return why
        time.sleep(rng.uniform(*SETTLE_S))
        before = job.pids()
        killed = time.monotonic()
        job.kill_processes(node=1)
        last = max(e.step for e in job.events() if e.kind == "step")

        def back() -> bool:
            return job.first_each_rank("step", before, killed) is not None

        why = job.until(back, BOUND_S)
        steps, loads, reads = (
            job.first_each_rank(kind, before, killed) for kind in ("step", "loaded", "read")
        )
        if why is not None or not (steps and loads and reads):
            return why or "it went on without a load"
        return (
            last - min(e.step for e in loads),
            sum(e.step for e in reads),
            max(e.at for e in loads) - killed,
            max(e.at for e in steps) - killed,
        )

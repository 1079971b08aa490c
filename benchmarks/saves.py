"""What a save of CPU tensors to memory costs training, beside DLRover's flash checkpoint of the same state."""

import json
from collections.abc import Sequence

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample

BOUND_S = 300.0


def rows(ours: Launcher | None, dlrover: Sequence[Launcher], gib: float) -> list[Row]:
    """A job of one rank for each; gib: parameters and what AdamW has of them."""
    own = None if ours is None else _measure(ours, "elastic", gib)
    others = [_measure(peer, "dlrover", gib) for peer in dlrover]
    found = []
    for measure in dict.fromkeys(name for one in (own or {}, *others) for name in one):
        peers = [other[measure] for other in others if measure in other]
        what = f"{gib:g} GiB of CPU tensors, one rank: {measure}"
        found.append(Row(measure=what, ours=own.get(measure) if own else None, peers=peers))
    return found


def _measure(launcher: Launcher, by: str, gib: float) -> dict[str, Sample]:
    options = ["--standalone", "--nproc_per_node=1", str(SCRIPTS / "saves.py")]
    with Job() as job:
        job.launch(launcher, [*options, f"--by={by}", f"--gib={gib}"])
        why = job.until(job.ended, BOUND_S)
        figures = job.out / "figures"
        lines = figures.read_text().splitlines() if figures.exists() else []
        codes = [node.poll() for node in job.nodes.values()]
        if why is None and codes != [0]:
            why = f"exit {codes}: {job.last_words()}"
    found: dict[str, Sample] = {}
    for line in lines:
        told = json.loads(line)
        sample = Sample(launcher=launcher.name, unit=told["unit"])
        found.setdefault(told["measure"], sample).add(told["value"])
    if why is not None:
        found.setdefault("all of it", Sample(launcher=launcher.name)).fail(why)
    return found

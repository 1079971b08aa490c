"""What a save to memory costs training, beside DLRover's flash checkpoint of the same state."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample

BOUND_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    ranks: int = 2
    device: str = "cpu"
    gib: float = 1.0
    """Parameters and what AdamW has of them, of each rank."""


def rows(ours: Launcher | None, dlrover: Sequence[Launcher], setting: Setting) -> list[Row]:
    """A job for each; every rank has a state of its own."""
    own = None if ours is None else _measure(ours, "elastic", setting)
    others = [_measure(peer, "dlrover", setting) for peer in dlrover]
    found = []
    for measure in dict.fromkeys(name for one in (own or {}, *others) for name in one):
        peers = [other[measure] for other in others if measure in other]
        what = f"{setting.ranks} x {setting.gib:.3g} GiB on {setting.device}: {measure}"
        found.append(Row(measure=what, ours=own.get(measure) if own else None, peers=peers))
    return found


def _measure(launcher: Launcher, by: str, setting: Setting) -> dict[str, Sample]:
    options = ["--standalone", f"--nproc_per_node={setting.ranks}", str(SCRIPTS / "saves.py")]
    with Job() as job:
        told = [f"--by={by}", f"--gib={setting.gib}", f"--device={setting.device}"]
        job.launch(launcher, [*options, *told])
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

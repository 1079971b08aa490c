"""Snapshots of a rank's state under elastic-run: what a save adds, how fast bytes get to host memory and
back; DCP's asynchronous save and a registered copy beside it, in the same run."""

import json
from dataclasses import dataclass

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample


@dataclass(frozen=True, kw_only=True)
class Setting:
    ranks: int = 1
    device: str = "cuda"
    gib: float = 11.5e9 / (1 << 30)
    bound_s: float = 400.0


def rows(ours: Launcher, setting: Setting) -> list[Row]:
    """One job with two lives; the figures of all its ranks."""
    with Job() as job:
        script = str(SCRIPTS / "snapshots.py")
        job.launch(
            ours,
            [
                "--standalone", f"--nproc_per_node={setting.ranks}", "--max_restarts=1", script,
                str(job.out), f"--device={setting.device}", f"--gib={setting.gib}",
            ],
        )  # fmt: skip
        why = job.until(job.ended, setting.bound_s)
        figures = job.out / "figures"
        lines = figures.read_text().splitlines() if figures.exists() else []
        codes = [node.poll() for node in job.nodes.values()]
        if why is None and codes != [0]:
            why = f"exit {codes}: {job.last_words()}"
    samples: dict[str, dict[str, Sample]] = {}
    for line in lines:
        found = json.loads(line)
        of_measure = samples.setdefault(found["measure"], {})
        who = found["who"]
        of_measure.setdefault(who, Sample(launcher=who, unit=found["unit"])).add(found["value"])
    if why is not None:
        samples["all of it"] = {ours.name: Sample(launcher=ours.name)}
        samples["all of it"][ours.name].fail(why)
    result: list[Row] = []
    for measure, of_measure in samples.items():
        first, *others = of_measure.values()
        result.append(Row(measure=measure, ours=first, peers=others))
    return result

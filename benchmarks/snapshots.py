"""Snapshots of a rank's state under elastic-run: what a save adds, how fast bytes get to host memory and
back; DCP's asynchronous save and a registered copy beside it, in the same run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample, lines

WAYS = ("shadow", "stream", "sync", "dcp")


@dataclass(frozen=True, kw_only=True)
class Setting:
    ranks: int = 1
    device: str = "cuda"
    gib: float = 11.5e9 / (1 << 30)
    ways: Sequence[str] = WAYS
    """What is measured, beside a load after SIGKILL, which always is; shadow alone takes 2 minutes on 4 GPUs,
    all of them 6."""
    bound_s: float = 540.0


class Figures:
    """What ranks tell, read while they go on; a row is printed once all ranks are beyond it."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path = path
        self._ranks = ranks
        self._read = 0
        self._over: set[int] = set()
        self._at: dict[int, tuple[str, str]] = {}
        """What each rank told last: measure, and of whom."""
        self._printed: dict[tuple[str, str], int] = {}
        self.samples: dict[str, dict[str, Sample]] = {}

    def over(self) -> bool:
        """Take in what is there; whether all ranks have told all."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(newline)
            for line in whole.splitlines():
                self._take(json.loads(line))
        return len(self._over) == self._ranks

    def _take(self, line: dict[str, object]) -> None:
        rank = int(str(line["rank"]))
        if "over" in line:
            self._over.add(rank)
            self._at.pop(rank, None)
        else:
            measure, who = str(line["measure"]), str(line["who"])
            of_measure = self.samples.setdefault(measure, {})
            sample = of_measure.setdefault(who, Sample(launcher=who, unit=str(line["unit"])))
            sample.add(float(str(line["value"])))
            self._at[rank] = measure, who
        for measure, of_measure in self.samples.items():
            for who, sample in of_measure.items():
                key, count = (measure, who), len(sample.values)
                if key not in self._at.values() and self._printed.get(key) != count:
                    self._printed[key] = count
                    (cells,) = lines([Row(measure=measure, ours=sample, peers=[])])
                    sys.stdout.write("| " + " | ".join(cells) + " |\n")
                    sys.stdout.flush()


def rows(ours: Launcher, setting: Setting) -> list[Row]:
    """One job with two lives; the figures of all its ranks."""
    with Job() as job:
        script = str(SCRIPTS / "snapshots.py")
        job.launch(
            ours,
            [
                "--standalone", f"--nproc_per_node={setting.ranks}", "--max_restarts=1", script,
                str(job.out), f"--device={setting.device}", f"--gib={setting.gib}",
                f"--ways={','.join(setting.ways)}",
            ],
        )  # fmt: skip
        figures = Figures(job.out / "figures", setting.ranks)
        why = job.until(figures.over, setting.bound_s)
    samples = figures.samples
    if why is not None:
        samples["all of it"] = {ours.name: Sample(launcher=ours.name)}
        samples["all of it"][ours.name].fail(why)
    result: list[Row] = []
    for measure, of_measure in samples.items():
        first, *others = of_measure.values()
        result.append(Row(measure=measure, ours=first, peers=others))
    return result

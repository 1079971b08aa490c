"""Samples, rows, the printed table and the JSON file."""

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Sample:
    """One launcher's figures for one measure, in `unit`; `failed` tries are not among them."""

    launcher: str
    unit: str = "s"
    values: list[float] = field(default_factory=list)
    failed: int = 0
    notes: list[str] = field(default_factory=list)  # why tries failed, or were slow

    @property
    def tries(self) -> int:
        """All tries, failed ones too."""
        return len(self.values) + self.failed

    def quantile(self, q: float) -> float | None:
        """The q-quantile of the tries that came through (nearest rank), or None without any."""
        if not self.values:
            return None
        ordered = sorted(self.values)
        return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]

    def add(self, value: float) -> None:
        """Count one try that came through, and show that something happens."""
        self.values.append(value)
        sys.stderr.write(f"{self.launcher}: {self.show(value)}\n")

    def show(self, value: float | None) -> str:
        """A figure with its unit."""
        if value is None:
            return "-"
        return f"{value:.2f} s" if self.unit == "s" else f"{value:.0f} {self.unit}"

    def fail(self, why: str) -> None:
        """Count one failed try."""
        self.failed += 1
        self.notes.append(why)
        sys.stderr.write(f"{self.launcher}: failed: {why}\n")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measure: ours, where it was run, and the peers."""

    measure: str
    ours: Sample | None
    peers: Sequence[Sample]


HEADER = ("measure", "launcher", "min", "p50", "p90", "p99", "max", "peer/ours", "n", "failed")


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's cells, ours first in each measure."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        base = row.ours.quantile(0.5) if row.ours else None
        for number, sample in enumerate([*([row.ours] if row.ours else []), *row.peers]):
            p50 = sample.quantile(0.5)
            ratio = f"{p50 / base:.1f}x" if sample is not row.ours and p50 and base else ""
            found.append(
                (
                    row.measure if number == 0 else "",
                    sample.launcher,
                    *(sample.show(sample.quantile(q)) for q in (0.0, 0.5, 0.9, 0.99, 1.0)),
                    ratio,
                    str(sample.tries),
                    f"{sample.failed} of {sample.tries}" if sample.failed else "0",
                )
            )
    return found


def render(rows: Sequence[Row]) -> str:
    """The table as Markdown, columns aligned."""
    cells = [HEADER, *lines(rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]

    def line(values: Sequence[str]) -> str:
        padded = (value.ljust(width) for value, width in zip(values, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])]) + "\n"


def heading() -> str:
    """What runs, of which commit, where and when: the first line of a raw file."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    name = Path(sys.argv[0]).stem
    load, when = os.getloadavg()[0], time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    command = " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])
    return (
        f"$ {command}   ({commit or 'no commit'}, {os.cpu_count()} cores, load {load:.1f}, {when})"
    )


def save(rows: Sequence[Row], path: Path) -> None:
    """Every single figure and where it was taken."""
    machine = {
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "load_1m": os.getloadavg()[0],
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
    )

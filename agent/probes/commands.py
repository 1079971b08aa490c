"""`elasticctl probe`: try this machine's devices, memory and disks by hand."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from elastic.agent.probes import run
from elastic.agent.probes.program import LEVELS
from elastic.agent.probes.verdicts import NodeVerdict
from elastic.proto import env
from elastic.proto.verbs import Context

COLUMNS = ("PROBE", "DEVICE", "VERDICT", "FIGURES")


def probe(context: Context, argv: Sequence[str]) -> int:
    """Tries this machine's GPUs or CPU, memory and disks; exit code 1 if something is faulty."""
    parser = argparse.ArgumentParser(prog="elasticctl probe", description=probe.__doc__)
    parser.add_argument(
        "--level", choices=LEVELS, default="quick", help="seconds, or minutes (quick)"
    )
    parser.add_argument(
        "--folder", action="append", type=Path, metavar="DIR",
        help="a folder whose disk is tried, repeatable ($TMPDIR)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    environ = dict(env.process_environment())
    verdict = asyncio.run(
        run.probe(
            args.level,
            devices=run.devices(environ),
            folders=args.folder or [Path(environ.get("TMPDIR") or "/tmp")],
            environ=environ,
        )
    )
    if context.out.json:
        context.out.document(document(verdict))
    else:
        context.out.table(COLUMNS, rows(verdict))
    return 1 if verdict.faults else 0


def rows(verdict: NodeVerdict) -> list[list[str]]:
    """A line a probe; what is wrong stands before the figures."""
    return [
        [p.probe, p.device or "-", p.state, "; ".join(filter(None, (p.what, _shown(p.figures))))]
        for p in verdict.probes
    ]


def document(verdict: NodeVerdict) -> dict[str, object]:
    return {
        "level": verdict.level,
        "state": verdict.state,
        "seconds": verdict.seconds,
        "probes": [asdict(probe) for probe in verdict.probes],
    }


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(name, value)}" for name, value in figures.items())


def _number(name: str, value: float) -> str:
    if name.endswith("_bytes") or name == "bytes":
        return f"{value / (1 << 30):.1f}GiB"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"

"""`elasticctl probe`: try this machine by hand, or several of them, alone and with one another."""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from elastic.agent.prctl import set_pdeathsig
from elastic.agent.probes import run
from elastic.agent.probes.program import LEVELS
from elastic.agent.probes.verdicts import NodeVerdict
from elastic.proto import env
from elastic.proto.verbs import Context

COLUMNS = ("PROBE", "DEVICE", "VERDICT", "FIGURES")
PARTS = ("PART", "DEVICE", "FROM", "SECONDS")
NODES = ("NODE", "VERDICT", "WHAT")


def probe(context: Context, argv: Sequence[str]) -> int:
    """Tries this machine's GPUs or CPU, memory and disks; with --nnodes, all machines on which it is started so, and
    then two by two; exit code 1 if something is faulty."""
    parser = argparse.ArgumentParser(prog="elasticctl probe", description=probe.__doc__)
    parser.add_argument(
        "--level", choices=LEVELS, default="quick", help="seconds, or minutes (quick)"
    )
    parser.add_argument(
        "--folder", action="append", type=_folder, metavar="DIR",
        help="a folder whose disk is tried, repeatable ($TMPDIR)",
    )  # fmt: skip
    parser.add_argument(
        "--nnodes", type=_machines, metavar="N", help="machines on which this is started (1)"
    )
    parser.add_argument(
        "--rdzv-endpoint", default="", metavar="HOST:PORT",
        help="where they meet; HOST is one of them, and shows the table",
    )  # fmt: skip
    parser.add_argument(
        "--exclude-straggler", action="store_true",
        help="call those faulty, too, that are slow beside the others",
    )  # fmt: skip
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also what took how long, of this machine"
    )
    args = parser.parse_args(argv)
    if args.rdzv_endpoint and args.nnodes is None:
        parser.error("--rdzv-endpoint wants --nnodes N")
    if (args.nnodes or 1) > 1:
        if not args.rdzv_endpoint:
            parser.error("--nnodes wants --rdzv-endpoint HOST:PORT")
        if args.verbose:
            parser.error("--verbose goes without --nnodes")
        if args.folder:
            parser.error("--folder goes without --nnodes: of several machines $TMPDIR is tried")
        extra = ("--exclude-straggler",) * args.exclude_straggler
        return _several(context, args.level, args.nnodes, args.rdzv_endpoint, extra)
    if args.exclude_straggler:
        parser.error("--exclude-straggler wants --nnodes N: slow is who is slower than others")
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
        if args.verbose:
            context.out.table(PARTS, times(verdict))
    return 1 if verdict.faults else 0


def _several(context: Context, level: str, nodes: int, endpoint: str, extra: Sequence[str]) -> int:
    """A job that only tries its nodes. extra: more of its flags."""
    with tempfile.TemporaryDirectory(prefix="elastic-probe-") as folder:
        report = Path(folder, "report.json")
        job = ("--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
        flags = ("--rdzv-id", "probe", "--state-dir", folder, "--report", str(report))
        command = [sys.executable, "-m", "elastic.run", *job, *flags, "--probe-only"]
        code = _launch([*command, "--precheck", level, *extra, "-"])
        if report.exists():  # here was the master
            found = json.loads(report.read_text())["checks"]
            if context.out.json:
                context.out.document({"level": level, "nodes": found})
            else:
                context.out.table(
                    NODES, [[one["node"], one["state"], one["what"]] for one in found]
                )
    return code


def _launch(command: Sequence[str]) -> int:
    """Its exit code. It does not outlive us, and we do not end before it, whatever signal we get."""
    told: list[int] = []

    def pass_on(number: int, _: object) -> None:
        told.append(number)
        process.send_signal(signal.SIGTERM)

    process = subprocess.Popen(
        command,
        preexec_fn=partial(set_pdeathsig, signal.SIGTERM),  # noqa: PLW1509 - we have no threads
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = process.wait()
    return 128 + told[0] if told else code


def _machines(text: str) -> int:
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of machines, from 1 up")
    return number


def _folder(text: str) -> Path:
    """One that is not there, such as a disk that was not mounted, is for the probe to tell."""
    path = Path(text)
    if not text or (path.exists() and not path.is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is no folder")
    return path


def rows(verdict: NodeVerdict) -> list[list[str]]:
    """A line a probe; what is wrong stands before the figures."""
    return [
        [p.probe, p.device or "-", p.state, "; ".join(filter(None, (p.what, _shown(p.figures))))]
        for p in verdict.probes
    ]


def times(verdict: NodeVerdict) -> list[list[str]]:
    """A line a part, as they began, in seconds."""
    return [
        [part.name, part.device or "-", f"{part.began:.2f}", f"{part.seconds:.2f}"]
        for part in verdict.parts
    ]


def document(verdict: NodeVerdict) -> dict[str, object]:
    return {
        "level": verdict.level,
        "state": verdict.state,
        "seconds": verdict.seconds,
        "probes": [asdict(probe) for probe in verdict.probes],
        "parts": [asdict(part) for part in verdict.parts],
    }


def _shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(name, value)}" for name, value in figures.items())


def _number(name: str, value: float) -> str:
    if name.endswith("_bytes") or name == "bytes":
        return f"{value / (1 << 30):.1f}GiB"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"

"""The demo from its command line to its verdict.

Both nodes are launchers on this machine. The demo strikes by itself, follows the job through its
master, and says what each fault cost. Exit code 0: the job finished, the loss fell, and every fault
was recovered from.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from elastic.agent import prctl
from elastic.proto.errors import ElasticError
from elastic.trainer.checkpoints import load_model, opened
from elastic.trainer.data import tokenizers
from elastic.trainer.sampling import Sampling, continue_text
from scripts.demo_nodes import sweep
from scripts.demo_run import Demo, Plan
from scripts.demo_screen import WIDTH, picture, summary
from scripts.demo_story import JobEnded

CORES = 2
"""CPUs that the demo takes. With all of a large machine, training would be over before a node that
comes back has imported torch."""
INTERRUPTED = 130
"""Exit code after ^C."""
SETTLED = 5
"""Lines of progress over which the last loss is averaged."""


def parse(arguments: Sequence[str] | None) -> Plan:
    """The command line; a mistake in it ends the process with one line and status 2."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/demo"), help="folder for logs, report, checkpoints")
    add("--steps", type=int, default=400, help="optimizer steps (%(default)s)")
    add(
        "--save-interval", type=int, default=50, help="steps between those on storage (%(default)s)"
    )
    add("--vocab-size", type=int, default=2048, help="words of the tokenizer (%(default)s)")
    add("--corpus-bytes", type=int, default=4_000_000, help="of text (%(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds until it gives up (%(default)g)")
    add("--plain", action="store_true", help="lines, not a screen; so without a terminal anyway")
    add("--svg", type=Path, help="write the terminal's picture to this file")
    add("trainer", nargs="*", help="after --: more arguments for elastic.trainer.pretrain_gpt")
    given = parser.parse_args(arguments)
    return Plan(
        out=given.out.absolute(),
        steps=given.steps,
        save_interval=given.save_interval,
        vocab_size=given.vocab_size,
        corpus_bytes=given.corpus_bytes,
        timeout=given.timeout,
        live=sys.stdout.isatty() and not given.plain,
        svg=given.svg,
        extra=tuple(given.trainer),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    plan = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    prctl.set_child_subreaper()  # so that nothing that a killed launcher leaves gets away
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    with _alone_in(plan.out):
        demo = Demo(plan, console)
        try:
            why = asyncio.run(_run(demo))
        finally:
            sweep()
        if why == "interrupted":
            console.print("interrupted: everything that was started has been ended")
            return INTERRUPTED
        report = _report(demo, why)
    if report["demo"]["sample"]:
        console.print(summary(report))
        if plan.svg is not None:
            picture(plan.svg, demo.frame(height=50), report)
    for problem in report["demo"]["problems"]:
        console.print(f"wrong: {problem}", markup=False, style="bold red")
    console.print(f"report: {plan.out / 'report.json'}", markup=False, soft_wrap=True)
    return 1 if report["demo"]["problems"] else 0


async def _run(demo: Demo) -> str:
    """Returns what kept it from its end; empty where nothing did."""
    loop = asyncio.get_running_loop()
    work = loop.create_task(demo.run())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        return "interrupted"
    except TimeoutError:
        return f"it was not over after {demo.plan.timeout:g} s"
    except JobEnded as error:
        return f"the job ended too early: {error}"
    return ""


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Empty the folder of an earlier demo; one that still runs there keeps it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another demo runs in {out}: wait for it, or give --out DIR")
        for name in ("checkpoints", "data", "logs"):
            shutil.rmtree(out / name, ignore_errors=True)
        for path in (*out.glob("node-?.log"), out / "report.json", out / "token"):
            path.unlink(missing_ok=True)
        yield


# --- the verdict ---------------------------------------------------------------------------------


def _report(demo: Demo, why: str) -> dict[str, Any]:
    """The job's report with the demo's own part, as written to `report.json`."""
    path = demo.plan.out / "report.json"
    try:
        report: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        report = demo.story.report  # the job did not get as far as writing it
    losses = [loss for _, loss in demo.story.losses]
    first, last = losses[:1], losses[-SETTLED:]
    report["demo"] = {
        "first_loss": _mean(first),
        "last_loss": _mean(last),
        "sample": "" if why else _sample(demo.plan.out / "checkpoints"),
        "faults": [asdict(fault) for fault in demo.faults],
        "problems": [why] if why else _problems(demo, report, _mean(first), _mean(last)),
    }
    if not why and not report["demo"]["sample"]:
        report["demo"]["problems"].append("the trained model wrote nothing")
    path.write_text(json.dumps(report, indent=2) + "\n")
    return report


def _problems(
    demo: Demo, report: dict[str, Any], first: float | None, last: float | None
) -> list[str]:
    """What is not as it should be, a sentence each."""
    found = [f"{name} ended with {code}" for name, code in demo.exit_codes().items() if code != 0]
    result = report.get("result") or {}
    if result.get("exit_code") != 0:
        found.append(f"the job did not succeed: {result.get('reason', 'it has no result')}")
    if report.get("step") != demo.plan.steps:
        found.append(f"it ended at step {report.get('step')}, not {demo.plan.steps}")
    if first is None or last is None or not last < first:
        found.append(f"the loss did not fall: {first} at first, {last} at last")
    for fault in demo.faults:
        if fault.recovery.cause != fault.expected:
            found.append(
                f"{fault.what}: the master says {fault.recovery.cause!r}, not {fault.expected!r}"
            )
    return found


def _sample(checkpoints: Path) -> str:
    """What the model writes; empty where it cannot."""
    try:
        model, words = load_model(opened(str(checkpoints))), tokenizers.load(checkpoints)
        return continue_text(model, words, "def ", Sampling(), max_new_tokens=64)
    except ElasticError:
        return ""


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

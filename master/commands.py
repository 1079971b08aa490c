"""`elasticctl`'s verbs about a whole job: status, events, why, restart, drain. The first three also read
the folder of a job whose master is gone.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from elastic.master import account, messages
from elastic.master.job import replay
from elastic.master.policy import Policy
from elastic.master.status import of_folder, of_master, open_journal
from elastic.proto import job_folder, verbs
from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from elastic.proto.errors import MasterUnreachable, NotFound
from elastic.proto.verbs import Context, Output, age, text

MOST_ROUNDS = 20
"""Whose ends are offered where another's is asked for."""
AWAY = 10.0
"""Seconds that `events --follow` waits for a master that is started again."""


# --- status --------------------------------------------------------------------------------------


def status(context: Context, argv: Sequence[str]) -> int:
    """What the job does now: phase, step, restarts, goodput, and its nodes."""
    _parser("status", status).parse_args(argv)
    job, out = context.find(), context.out
    document = of_master(job.status) if job.status is not None else of_folder(job, out)
    if out.json:
        out.document(document)
    else:
        _show(out, document)
    return 0


def _show(out: Output, document: dict[str, Any]) -> None:
    told = document["productive_seconds"] or document["step"]
    cells = {
        "JOB": document["job"],
        "PHASE": document["phase"],
        "ROUND": str(document["round"]),
        "WORLD": str(document["world_size"]),
        "STEP": str(document["step"] or "-"),
        "RESTARTS": str(document["restarts"]),
        "GOODPUT": f"{document['goodput']:.1%}" if told else "-",
        "AGE": age(document["seconds"]),
    }
    cells |= _metrics(document["metrics"] or {})
    if document["stale_messages"]:
        cells["STALE"] = str(document["stale_messages"])
    out.table(tuple(cells), [tuple(cells.values())])
    if document["reason"]:
        out.text(f"\n{document['reason']}")
    for one in document["stragglers"] or ():
        out.text(f"\nslow: {one['reason']}")
    if document["nodes"]:
        out.text("")
        out.table(
            ("NODE", "STATE", "RANKS", "STEP", "PHASE", "STARTED-BY", "HOST"),
            [_node_row(node) for node in sorted(document["nodes"], key=_node_order)],
        )


_ODD = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


def _metrics(told: dict[str, Any]) -> dict[str, str]:
    """What the script said of its newest step, as far as it said it."""
    losses = told.get("losses")
    loss = next(iter(losses.values()), None) if isinstance(losses, dict) else None
    found = {
        "LOSS": _cell(loss, ".4g"),
        "TOKENS/S": _cell(told.get("tokens_per_second"), ",.0f"),
        "MFU": _cell(told.get("mfu"), ".1%"),
    }
    return {name: text for name, text in found.items() if text}


def _cell(value: Any, form: str) -> str:
    """A number; what is none is told by its name, and anything else not at all."""
    try:
        return format(float(value), form) if isinstance(value, int | float) else str(_ODD[value])
    except (KeyError, TypeError, OverflowError):
        return ""


def _node_order(node: dict[str, Any]) -> tuple[bool, int, str]:
    return node["node_rank"] is None, node["node_rank"] or 0, node["node"]


def _node_row(node: dict[str, Any]) -> tuple[str, ...]:
    ranks = node["ranks"]
    numbers = [rank["rank"] for rank in ranks]
    return (
        node["node"],
        node["state"],
        _span(numbers),
        _span([rank["step"] for rank in ranks if rank["step"]]),
        _each(rank["phase"] for rank in ranks),
        _each(rank["started_by"] for rank in ranks),
        node["host"] or "-",
    )


def _span(numbers: Sequence[int]) -> str:
    if not numbers:
        return "-"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _each(words: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(word for word in words if word)) or "-"


# --- events --------------------------------------------------------------------------------------


def events(context: Context, argv: Sequence[str]) -> int:
    """What happened to the job, and why; -o json writes one object a line."""
    parser = _parser("events", events)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job is over")
    args = parser.parse_args(argv)
    job, out = context.find(past=not args.follow), context.out
    if job.status is None:
        _print_journal(job, out, 0, follow=args.follow)
    else:
        asyncio.run(_print_events(job, out, follow=args.follow))
    return 0


_WIDTHS = (8, 13, 0)
"""Of the columns of a list that grows: a time, the longest kind, a reason."""


async def _print_events(job: verbs.Job, out: Output, *, follow: bool) -> None:
    seen, listed = 0, []
    if follow:
        _head(out)
    async with MasterClient(job.master, job.security) as master:
        while True:
            try:
                async for record in master.events(seen, follow):
                    seen = record.sequence
                    if follow:
                        _line(out, record)
                    else:
                        listed.append(record)
                break
            except MasterUnreachable:
                if not follow:
                    raise
                if job.folder is not None and job_folder.read_report(job.folder) is not None:
                    _print_journal(job, out, seen, follow=True, head=False)
                    return
                await master.status(AWAY)  # killed, and back in a moment
    if not follow:
        _list(out, listed)


def _print_journal(
    job: verbs.Job, out: Output, after: int, *, follow: bool, head: bool = True
) -> None:
    journal = open_journal(job)
    try:
        records = [messages.record(note) for note in journal.notes(after)]
    finally:
        journal.close()
    if not follow:
        _list(out, records)
        return
    if head:
        _head(out)
    for record in records:
        _line(out, record)


def _head(out: Output) -> None:
    if not out.json:
        out.row(("TIME", "KIND", "REASON"), _WIDTHS)


def _line(out: Output, record: pb.EventRecord) -> None:
    if out.json:
        out.document(_event(record), line=True)
    else:
        clock = time.strftime("%H:%M:%S", time.localtime(record.time))
        out.row((clock, record.kind, _one_line(record.reason)), _WIDTHS)


def _list(out: Output, records: Sequence[pb.EventRecord]) -> None:
    if out.json:
        for record in records:
            out.document(_event(record), line=True)
        return
    now = time.time()
    rows = [(age(now - r.time), r.kind, _one_line(r.reason)) for r in records]
    out.table(("AGE", "KIND", "REASON"), rows)


def _event(record: pb.EventRecord) -> dict[str, Any]:
    return {
        "sequence": record.sequence,
        "time": record.time,
        "job_time": record.job_time,
        "kind": record.kind,
        "reason": record.reason,
        "detail": json.loads(record.detail_json or "{}"),
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- why -----------------------------------------------------------------------------------------


def why(context: Context, argv: Sequence[str]) -> int:
    """What ended the last round that failed, or the one asked for: where it began, by what evidence,
    what was done about it."""
    parser = _parser("why", why)
    parser.add_argument("--round", type=_round, metavar="N", help="of that round")
    args = parser.parse_args(argv)
    job, out = context.find(past=True), context.out
    if job.folder is None:
        raise NotFound(
            f"only the address of the master of job {job.name} is known: its journal is told of "
            "where its folder is (--dir)"
        )
    told = _endings(job)
    ending = account.chosen(told, args.round)
    if ending is None and args.round is not None:
        rounds = ", ".join(str(one["round"]) for one in told[-MOST_ROUNDS:]) or "none"
        raise NotFound(f"the journal tells of no end of round {args.round}; of those of: {rounds}")
    if out.json:
        out.document(ending or {"round": None, "failed": False})
    else:
        out.text(account.paragraph(ending) if ending else NONE_ENDED)
    return 0


NONE_ENDED = (
    "No round has ended: nothing failed. A hang that was only told of (--hang-action dump) is in "
    "elasticctl events."
)


def _endings(job: verbs.Job) -> list[Mapping[str, Any]]:
    """Of the rounds that have ended, a document each, oldest first: as they were noted, and better by the events that the
    journal still has."""
    journal = open_journal(job)
    try:
        before, _, _, entries = journal.load()
        noted = [(json.loads(note.detail), note.job) for note in journal.notes(0)]
    finally:
        journal.close()
    events = [(entry.event, entry.job) for entry in entries]
    now = replay(before, events, Policy())
    found = {
        one["round"]: account.since_noted(one, now.last_round)
        for one, at in noted
        if "next_round" in one and at >= now.ledger.began
    }
    told = account.endings(before, events, Policy())
    found |= {ending.round: account.document(ending) for ending in told}
    return [found[number] for number in sorted(found)]


def _round(argument: str) -> int:
    if not argument.isdecimal() or not 0 < int(argument) < 1 << 63:
        raise argparse.ArgumentTypeError(f"{argument!r} is no round: a number of 1 or more")
    return int(argument)


# --- restart and drain ---------------------------------------------------------------------------


def restart(context: Context, argv: Sequence[str]) -> int:
    """Start all ranks again in a new round, once they have saved the step that they are in; counts
    against nothing."""
    parser = _parser("restart", restart)
    parser.add_argument(
        "--from",
        dest="step",
        type=_step,
        default=0,
        metavar="STEP",
        help="at once, and go back to that step's checkpoint on storage, whatever newer ones there are",
    )
    _add_reason(parser)
    args = parser.parse_args(argv)
    job = _alive(context)

    async def ask() -> str:
        async with MasterClient(job.master, job.security) as master:
            return await master.restart(args.reason, args.step)

    return _accepted(context, job, asyncio.run(ask()))


def drain(context: Context, argv: Sequence[str]) -> int:
    """Let a node, or the whole job, save what it has and leave."""
    parser = _parser("drain", drain)
    parser.add_argument("node", metavar="NODE", nargs="?", type=_name, help="the whole job if none")
    _add_reason(parser)
    args = parser.parse_args(argv)
    job = _alive(context)

    async def ask() -> str:
        async with MasterClient(job.master, job.security) as master:
            return await master.drain(args.node or "", args.reason)

    try:
        answer = asyncio.run(ask())
    except NotFound as error:
        raise NotFound(f"{error}: `elasticctl status` lists them") from error
    return _accepted(context, job, answer)


def _step(argument: str) -> int:
    if not argument.isdecimal() or not 0 < int(argument) < 1 << 63:
        raise argparse.ArgumentTypeError(f"{argument!r} is no step: a number of 1 or more")
    return int(argument)


def _name(argument: str) -> str:
    if not argument.strip():  # a variable of a script that was never set
        raise argparse.ArgumentTypeError("it is empty: leave it out to drain the whole job")
    return text(argument)


def _alive(context: Context) -> verbs.Job:
    job = context.find()
    if job.status is None:
        raise NotFound(
            f"job {job.name} has no master: it is over or was killed, and only a job that runs "
            "can be told to do something"
        )
    return job


def _accepted(context: Context, job: verbs.Job, answer: str) -> int:
    if context.out.json:
        context.out.document({"job": job.name, "message": answer})
    else:
        context.out.text(f"{job.name}: {answer}")
    return 0


def _add_reason(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reason", default="", metavar="TEXT", type=text, help="why, for the job's events"
    )


def _parser(name: str, verb: Any) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"elasticctl {name}", description=verb.__doc__)

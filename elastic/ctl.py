"""`elasticctl`: look at a job and tell it things. Finds the job by its folder or by its master's
address; its verbs are entry points, found by name, none of them imported here.

Exit codes: 0 done, 1 it could not be done (one line says why and what to do), 2 usage, 130 ^C; verbs
that speak to a cluster: 3 it is not there, 4 not in time, 5 not allowed, too.
"""

import argparse
import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic.proto import job_folder
from elastic.proto.env import configure_grpc
from elastic.proto.errors import (
    ElasticError,
    MasterRefused,
    MasterUnreachable,
    NotFound,
    UsageError,
)
from elastic.proto.security import TOKEN, Security, read_token
from elastic.proto.verbs import GROUP, Context, Job, forms_of, text
from elastic.proto.visible import visible

PATIENCE = 2.0
"""Seconds that a master named in a job's folder may be away: its guardian may be starting it again."""

_STYLES = {
    **dict.fromkeys(("running", "training", "succeeded", "finished"), "green"),
    **dict.fromkeys(("forming", "restarting", "draining", "drained", "stopped", "spare"), "yellow"),
    **dict.fromkeys(("failed", "unreachable", "dead"), "red"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    configure_grpc()
    if argv is None:
        # What a verb has written by half is removed at its end, which a time limit may bring.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    argv = sys.argv[1:] if argv is None else list(argv)
    if not _has_streams():
        return 1
    verbs = {point.name: point for point in entry_points(group=GROUP)}
    parser = _parser(verbs)
    ours = argv.index("--") if "--" in argv else len(argv)  # behind it is a command of the user's
    args = parser.parse_args(argv[:ours])
    # The general options may stand behind the verb too.
    args, rest = _general(add_help=False).parse_known_args(args.rest, args)
    rest += argv[ours:]
    _check(parser, args)
    if not verbs:
        _say(
            "this checkout is not installed, so its verbs are not known: run `pip install -e .` in it"
        )
        return 1
    if args.verb not in verbs:
        parser.error(f"there is no verb {args.verb!r}: write one of {', '.join(sorted(verbs))}")
    verb = verbs[args.verb].load()
    if args.output not in (may := forms_of(verb)):
        parser.error(f"{args.verb} has no form {args.output!r}: write -o {' or '.join(may)}")
    context = Context(out=_Terminal(args.output), find=partial(_find, parser, args))
    try:
        return int(verb(context, rest))
    except ElasticError as error:
        _say(error)
        return 1
    except BrokenPipeError:  # the reader, `head` say, has had enough
        _discard()
        return 0
    except OSError as error:
        what = error.filename or "the answer cannot be written"
        _say(f"{what}: {error.strerror}")
        if not error.filename:
            _discard()
        return 1
    except KeyboardInterrupt:
        return 130


# --- the command line ----------------------------------------------------------------------------


def _general(**settings: Any) -> "_Parser":
    parser = _Parser(allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--dir",
        metavar="DIR",
        help="the job's folder, or the --state-dir or --log-dir with several: then the newest "
        f"job in it ($ELASTIC_STATE_DIR, else {job_folder.default_base()})",
    )
    where.add_argument(
        "--master", metavar="HOST:PORT", type=text, help="address of the job's master"
    )
    where.add_argument(
        "--job",
        metavar="[NAMESPACE/]NAME",
        type=text,
        help="an ElasticJob of the kubeconfig's cluster and namespace",
    )
    parser.add_argument(
        "-o",
        dest="output",
        choices=("table", "wide", "json", "yaml", "name"),
        help="form of the answer (table); wide, yaml and name: of what is in a cluster",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"file with the job's token (${TOKEN})"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate to show (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="authority that signed the master's certificate (PEM)"
    )
    return parser


def _parser(verbs: Mapping[str, EntryPoint]) -> argparse.ArgumentParser:
    parser = _general(
        prog="elasticctl",
        description="Look at a job of elastic-run, and tell it things.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.verbs = verbs
    parser.set_defaults(
        dir=None, master=None, job=None, output="table",
        token_file=None, tls_cert=None, tls_key=None, tls_ca=None,
    )  # fmt: skip
    parser.add_argument("verb", metavar="VERB", help="what to do")
    parser.add_argument(
        "rest", metavar="...", nargs=argparse.REMAINDER, default=[], help="see VERB --help"
    )
    return parser


class _Parser(argparse.ArgumentParser):
    verbs: Mapping[str, EntryPoint] = MappingProxyType({})

    def format_help(self) -> str:
        lines = [  # only here: a verb's help is its own, and costs an import
            f"  {name:<10} {' '.join((point.load().__doc__ or '').split())}"
            for name, point in sorted(self.verbs.items())
        ]
        self.epilog = "\n".join(["verbs:", *lines])
        return super().format_help()


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    named = {"--dir": args.dir, "--master": args.master, "--job": args.job}
    for flag, given in named.items():
        if given == "":  # an unset variable must not drain whatever job is the newest
            parser.error(f"{flag} is empty: say which job, or leave it out")
    if len(said := [flag for flag, given in named.items() if given]) > 1:
        parser.error(f"{' and '.join(said)} both say which job: give one of them")
    if args.master and not args.master.rpartition(":")[2].isdecimal():
        parser.error(f"--master {args.master}: write HOST:PORT")
    if len({args.tls_cert is None, args.tls_key is None, args.tls_ca is None}) > 1:
        parser.error("--tls-cert, --tls-key and --tls-ca go together: give all or none")


# --- the job -------------------------------------------------------------------------------------


def _find(parser: argparse.ArgumentParser, args: argparse.Namespace, *, past: bool = False) -> Job:
    security = _security(parser, args)
    if args.job:
        return _in_cluster(args.job, security)
    if args.master:
        status = asyncio.run(_ask(args.master, security, 0.0))
        return Job(
            name=status.run_id, folder=None, master=args.master, status=status, security=security
        )
    base = Path(args.dir or os.environ.get("ELASTIC_STATE_DIR") or job_folder.default_base())
    if base == job_folder.default_base() and base.is_dir() and not job_folder.is_ours(base):
        raise NotFound(f"{base} is not yours alone, so it is not believed: give --dir or --master")
    folder = job_folder.find_newest(base)
    if folder is None:
        raise NotFound(
            f"there is no job in {base}: give its folder (--dir), as named by --state-dir or "
            "--log-dir when it was started, or its master's address (--master)"
        )
    return _in_folder(folder, security, past=past)


def _in_cluster(name: str, security: Security) -> Job:
    from elastic.k8s import finding  # a cluster's client takes its time, and other jobs need none

    found = asyncio.run(finding.master(name))
    security = replace(security, token=security.token or found.token)
    try:
        status = asyncio.run(_ask(found.address, security, PATIENCE))
    except MasterUnreachable as error:
        space, _, pod = found.pod.partition("/")
        raise MasterUnreachable(
            f"{error} Pods are reached from inside the cluster: run `kubectl -n {space} port-forward "
            f"pod/{pod} {found.port}`, and beside it elasticctl with --master 127.0.0.1:{found.port}"
        ) from error
    return Job(name=name, folder=None, master=found.address, status=status, security=security)


def _in_folder(folder: Path, security: Security, *, past: bool) -> Job:
    note = job_folder.read_note(folder)
    name = note.run_id if note else folder.name
    dead = Job(name=name, folder=folder, master="", status=None, security=security)
    if note is None or job_folder.read_report(folder) is not None:
        return dead
    if security.token and (why := job_folder.distrust(folder)):
        _say(f"{why}, so the job's token is not sent to the address in it: give --master HOST:PORT")
        security = replace(security, token="")
    try:
        status = asyncio.run(_ask(note.address, security, PATIENCE))
    except (MasterUnreachable, MasterRefused) as error:
        lives = note.lives()  # else somebody else may have the port by now
        if lives and not (past and isinstance(error, MasterUnreachable)):
            raise
        there = f" Its process {note.pid} is there." if lives else ""
        _say(f"{error}{there} Here is what {folder} says.")
        return dead
    if status.run_id != note.run_id:
        return dead
    return Job(name=name, folder=folder, master=note.address, status=status, security=security)


async def _ask(address: str, security: Security, patience: float) -> Any:
    from elastic.proto.calls import MasterClient  # grpc takes its time, and --help needs none

    async with MasterClient(address, security) as master:
        return await master.status(patience)


def _security(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Security:
    cert, key, ca = (
        Path(name) if name else None for name in (args.tls_cert, args.tls_key, args.tls_ca)
    )
    try:
        token = read_token(os.environ, args.token_file)
        security = Security(token=token, cert=cert, key=key, ca=ca)
        security.check()
    except UsageError as error:
        parser.error(str(error))
    return security


# --- output --------------------------------------------------------------------------------------


def _has_streams() -> bool:
    """Whether there is an output to answer to; names of files may hold bytes that are no text."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stdout is None:
        _say("standard output is closed")
        return False
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return True


def _say(what: object) -> None:
    sys.stderr.write(f"elasticctl: {visible(str(what))}\n")
    sys.stderr.flush()


def _discard() -> None:
    """Let what is left in the buffer of standard output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Terminal:
    """Standard output, in colours where it is a terminal. Lines are as long as they need to be: a
    terminal wraps them, and a pipe wants them whole.
    """

    def __init__(self, form: str) -> None:
        self.form = form
        self.json = form == "json"
        self._console = Console(highlight=False, markup=False, emoji=False, width=1 << 16)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
        for name in columns:
            table.add_column(name, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(visible(cell), style=_STYLES.get(cell, "")) for cell in row))
        with self._console.capture() as captured:
            self._console.print(table)
        self._write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))

    def row(self, cells: Sequence[str], widths: Sequence[int]) -> None:
        self.text("   ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip())

    def text(self, line: str) -> None:
        self._write(f"{visible(line)}\n")

    def document(self, value: Mapping[str, Any], *, line: bool = False) -> None:
        self._write(json.dumps(value, indent=None if line else 2) + "\n")

    def raw(self, data: bytes) -> None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def note(self, line: str) -> None:
        _say(line)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""What would fail late, or wait in silence, found before anything starts."""

import errno
import os
import resource
from pathlib import Path

from elastic.options import Options
from elastic.proto.errors import UsageError
from elastic.proto.job_folder import JOURNAL
from elastic.proto.limits import LONGEST_NAME, MOST_SLOTS

FEWEST_FILES = 512
"""Descriptors of ranks begin at 200 (agent/starters/fork.py), and a rank has what the shell allows."""
LONGEST_JOURNAL = 504
"""Bytes of its path: SQLite's 512 less the ending of a file that it keeps beside it."""


def open_files() -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < FEWEST_FILES:
        raise UsageError(
            f"this shell allows {limit} open files, elastic-run needs {FEWEST_FILES}: "
            f"ulimit -n {FEWEST_FILES}"
        )


def names(options: Options) -> None:
    """What the master gets to read, and what is run."""
    if not options.entry:
        raise UsageError("the script's name is empty: is a variable of your command line unset?")
    texts = [("--rdzv-id", options.run_id), ("--role", options.role)]
    texts += [("--node-id", options.node_id or "")]
    texts += [("--label", text) for pair in options.labels.items() for text in pair]
    for flag, text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{flag} {text!r}: it is no text in UTF-8") from error
    if len(options.node_id or "") > LONGEST_NAME:
        raise UsageError(f"--node-id: a node's name has {LONGEST_NAME} characters at most")


def slots(count: int) -> None:
    if count > MOST_SLOTS:
        raise UsageError(f"--nproc-per-node: {count} ranks, and a node has {MOST_SLOTS} at most")


def rank_unit(options: Options, slots: int) -> None:
    """No world can be a multiple of it. Other nodes may have more slots than this one."""
    most = slots if options.max_nodes == 1 else options.max_nodes * MOST_SLOTS
    if options.rank_unit > most:
        nodes = "1 node has" if options.max_nodes == 1 else f"{options.max_nodes} nodes can have"
        raise UsageError(
            f"--rank-unit {options.rank_unit}: {nodes} {most} ranks at most, and no multiple of it"
        )


def master_files(run_dir: Path, report: str | None) -> None:
    """What the master of this node will write."""
    length = len(os.fsencode(os.path.realpath(run_dir / JOURNAL)))
    if length > LONGEST_JOURNAL:
        raise UsageError(
            f"{run_dir}: the journal's path there has {length} bytes, and SQLite takes "
            f"{LONGEST_JOURNAL}: give a shorter --state-dir or --log-dir"
        )
    if report:
        try:
            _check_report(Path(report).resolve())
        except OSError as error:
            raise UsageError(f"--report {report}: {error.strerror}") from error


def _check_report(path: Path) -> None:
    """Raises OSError where it cannot be written; leaves nothing but its folder."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file, and would be replaced by one")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.touch()
    draft.unlink()

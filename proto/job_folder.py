"""What a job leaves in its folder, `<state or log dir>/<run id>`, for whoever looks for it later;
what the folder is called, and whose it is.

journal.db     the master's events and notes (master/journal.py)
master.json    where the master listens, written by each of its lives
report.json    how the job ended; newer than master.json once it is over
report_<n>.json  the same of an earlier life of the job; n: the epoch before the next one began. The
               newest KEEP_REPORTS of them
attempt_<n>/   log files of a round (agent/logs/logs.py)
metrics.jsonl  what a script says of its steps (docs/trainer-watching.md); only where its rank 0 ran
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic.proto import env, process
from elastic.proto.errors import NotFound

JOURNAL = "journal.db"
MASTER = "master.json"
REPORT = "report.json"
METRICS = "metrics.jsonl"

KEEP_REPORTS = 100
"""Of earlier lives."""
MOST_METRICS = 4096
"""Bytes of a line of metrics that is handed on."""

_METRICS_END = 1 << 16
"""Bytes of their end that are looked through."""
_FOREIGN = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a file may raise that is cut, or not ours."""
LONGEST_NAME = 200
"""Bytes of a folder's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterNote:
    """One life of a job's master."""

    address: str
    """host:port, as agents dial it."""
    run_id: str
    pid: int
    began: str = ""
    """When that process did (`process.began`); empty: a version wrote it that did not say."""
    launch: str = ""
    """Of the launcher whose master it is."""
    job_uid: str = ""
    epoch: int = 0

    def lives(self) -> bool:
        """Whether that process is there, on this machine. Where `began` is empty, another of its number will do."""
        began = process.began(self.pid)
        return bool(began) and self.began in ("", began)


def hang(number: int) -> str:
    """Name of the file with what all ranks did while round `number` hung."""
    return f"hang-{number}.txt"


def default_base() -> Path:
    """Where jobs keep their folders if they are not told otherwise."""
    return Path(tempfile.gettempdir()) / f"elastic-{os.getuid()}"


def of_rank(environ: Mapping[str, str]) -> Path | None:
    """The folder of the job that a rank belongs to, by its environment; None where it has no logs."""
    error_file = environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not error_file or env.MARK not in environ:
        return None
    return Path(error_file).parents[2]  # attempt_<n>/<rank>/error.json


def newest_metrics(folder: Path) -> str:
    """The newest line of a step in a folder's metrics, as it stands there; empty without one.

    Of a file that anything may have been written to: whole lines of its end that are JSON objects count.
    """
    try:
        fd = os.open(folder / METRICS, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        told = os.fstat(fd)
        size = told.st_size if stat.S_ISREG(told.st_mode) else 0
        end = os.pread(fd, _METRICS_END, max(0, size - _METRICS_END))
    except OSError:
        return ""
    finally:
        os.close(fd)
    *lines, _ = end.split(b"\n")  # the last is being written, or empty
    for line in reversed(lines):
        if len(line) <= MOST_METRICS and step_of(text := line.decode(errors="replace")):
            return text
    return ""


def step_of(line: str) -> dict[str, Any] | None:
    """What such a line says; None where it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("kind") == "step" else None


def is_ours(folder: Path) -> bool:
    """Whether nobody else can have put there what we find in `folder`, or take it away."""
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return own and not found.st_mode & 0o022


def folder_name(run_id: str) -> str:
    """What the folder of a job is called: its run id, where a file can have that name.

    The rest is written as %XX, a long one is cut and a hash put behind it, so that two run ids never
    share a folder and none leads out of its base.
    """
    name = "".join(c if c.isprintable() and c not in "/%" else _escape(c) for c in run_id)
    if name in (".", ".."):
        name = name.replace(".", "%2E")
    if 0 < len(name.encode()) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(run_id.encode(errors="surrogatepass")).hexdigest()[:32]
    return f"{name.encode()[: LONGEST_NAME - 40].decode(errors='ignore')}%~{digest}"


def _escape(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode(errors="surrogatepass"))


def distrust(folder: Path) -> str:
    """Why a stranger may have put there what lies in a job's folder; empty: none can have.

    It must be ours or root's, and so must a link to it; a group that may write there was chosen by
    its owner. Raises OSError.
    """
    plain = _suspicion(folder, {os.getuid(), 0}, lawless=False)
    return plain and _suspicion(folder, *_as_shown(folder.absolute().parent))


def _suspicion(folder: Path, owners: set[int], lawless: bool) -> str:
    for found in (folder.lstat(), folder.stat()):
        if found.st_uid not in owners:
            return f"{folder} is another user's (uid {found.st_uid})"
    return f"others may write to {folder}" if found.st_mode & 0o002 and not lawless else ""


def _as_shown(base: Path) -> tuple[set[int], bool]:
    """Whose our files are in `base`, and whether one of ours is everybody's there.

    A network file system may give what root writes to nobody, or know neither owners nor modes: what
    we make ourselves shows how it tells us from others, if it does.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=".elastic-", dir=base)
    except OSError:
        return {os.getuid(), 0}, False
    found = os.fstat(fd)
    os.close(fd)
    os.unlink(name)
    return {os.getuid(), 0, found.st_uid}, bool(found.st_mode & 0o002)


def write_note(folder: Path, note: MasterNote) -> None:
    """Atomically. Raises OSError."""
    draft = folder / f"{MASTER}.part"
    draft.write_text(json.dumps(asdict(note)) + "\n")
    os.replace(draft, folder / MASTER)


def read_note(folder: Path) -> MasterNote | None:
    """None where there is none, or none that can be read."""
    try:
        found = json.loads((folder / MASTER).read_text())
        address = str(found["address"])
        address.encode()  # JSON can hold what is no text, and could not be dialled
        return MasterNote(
            address=address,
            run_id=str(found["run_id"]),
            pid=int(found["pid"]),
            began=str(found.get("began", "")),
            launch=str(found.get("launch", "")),
            job_uid=str(found.get("job_uid", "")),
            epoch=int(found.get("epoch", 0)),
        )
    except _FOREIGN:
        return None


def read_report(folder: Path) -> dict[str, Any] | None:
    """The report of a job that is over; None where it is not, or left none that can be read."""
    over = _changed(folder / REPORT)
    if not over or over < _changed(folder / MASTER):
        return None
    try:
        report = json.loads((folder / REPORT).read_text())
        return report if _is_report(report) else None
    except _FOREIGN:
        return None


def _is_report(report: Any) -> bool:
    """It has what is shown of it (master/report.py); raises one of `_FOREIGN` where it is none."""
    texts = (report["job"], report["result"]["outcome"], report["result"]["reason"])
    numbers = (
        *(report[name] for name in ("rounds", "epoch", "step")),
        *(report[name] for name in ("seconds", "productive_seconds", "goodput")),
        *report["restarts_by_cause"].values(),
    )
    return all(isinstance(found, str) for found in texts) and all(
        isinstance(found, int | float) and abs(found) < 1e15 for found in numbers
    )


def put_report_aside(folder: Path, epoch: int) -> None:
    """Before another life of the job: keep how the last one, which had `epoch`, ended. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder / REPORT, folder / f"report_{epoch}.json")
    names = (re.fullmatch(r"report_(\d+)\.json", entry.name) for entry in folder.iterdir())
    kept = sorted((match for match in names if match), key=lambda match: int(match[1]))
    for match in kept[:-KEEP_REPORTS]:
        (folder / match[0]).unlink(missing_ok=True)


def find_newest(base: Path) -> Path | None:
    """The job's folder that `base` is, else the one in it where something happened last; what
    cannot be read is passed over. Raises NotFound where that is `base`.
    """
    if _is_job(base):
        return base
    try:
        jobs = [path for path in base.iterdir() if _is_job(path)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise NotFound(f"{base} cannot be read: {error.strerror}") from error
    return max(jobs, key=_last_event, default=None)


def _is_job(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in (JOURNAL, MASTER))


def _last_event(folder: Path) -> int:
    return max(_changed(folder / name) for name in (JOURNAL, f"{JOURNAL}-wal", MASTER, REPORT))


def _changed(path: Path) -> int:
    """Nanoseconds of Unix; 0 if it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0

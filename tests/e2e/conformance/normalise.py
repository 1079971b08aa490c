"""Make two runs of one case comparable: replace what differs from run to run, flatten the rest."""

import json
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from .cases import CASES
from .runner import ROOT, Observation

Flat = dict[str, Any]  # key path -> JSON value

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
REPLACED = (
    (UUID, "<uuid>"),
    (re.compile(r"torchelastic_[a-z0-9_]{8}"), "torchelastic_<random>"),
    (re.compile(r"<tmp>/tmp/(watchdog_timer_<uuid>|elastic-timers-\d+)"), "<some pipe>"),
    (re.compile(r"(?<=/)(<uuid>|none|[A-Za-z0-9.-]+)_[a-z0-9_]{8}(?=/attempt_|$)"), r"\1_<random>"),
    (re.compile(r"\d{4}-\d\d-\d\d[_ T]\d\d:\d\d:\d\d([.,]\d+)?"), "<time>"),
    (re.compile(r"\b([IWEF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "), r"\1<time> <pid> "),
    (re.compile(r"\[([IWEF])\d{3,4} \d\d:\d\d:\d\d\.\d+ "), r"[\1<time> "),
    (re.compile(r"(\bpid\b\W{0,4})\d+", re.IGNORECASE), r"\1<pid>"),
    (re.compile(r"(?<=process )\d+"), "<pid>"),
    (re.compile(r"(?<=host_)\d+_0"), "<pid>_0"),
    (re.compile(r"_\d{3,7}_\d(?=')"), "_<pid>_<n>"),
    (re.compile(r"0x[0-9a-f]{6,}"), "<address>"),
    (re.compile(r"\b\d+\.\d+(?= ?(s\b|sec|seconds))"), "<seconds>"),
    (re.compile(r"('timestamp'|\"timestamp\"): (['\"]?)\d+(\.\d+)?\2"), r"\1: <time>"),
    (re.compile(r"(localhost|127\.0\.0\.1|\[::1\]|\[?::ffff:127\.0\.0\.1\]?|vm)([:|, ]{1,3})\d{4,5}\b"),
     r"\1\2<some port>"),
)  # fmt: skip
PREFIX = r"(?:\[[^\]]*\]:|<[^>]*> )?"
WORKER_LINE = re.compile(PREFIX + r"@@ ")
LOST_STORE = re.compile(
    r"^\[W[^\n]* TCPStore\.cpp[^\n]*\n(?:(?:Exception raised from|frame #)[^\n]*\n|\n)*",
    re.MULTILINE,
)
"""What torch says where torchrun's nodes end one after the other, and the store before the last: or not."""
TRACEBACK = re.compile(r"^Traceback .*\n(?:[ \t].*\n)*\w+Error: @@ .*\n", re.MULTILINE)
BANNER = "OMP_NUM_THREADS"  # the words may be a launcher's own


@dataclass(frozen=True)
class Delta:
    """One key on which two runs disagree; a side that lacks it has `ABSENT`."""

    key: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.key}\n    torchrun: {self.theirs!r}\n    ours:     {self.ours!r}"


ABSENT = "<absent>"
ATTEMPT = re.compile(r"(.*?)/(attempt_\d+(?:/.*)?)")


class _Text:
    """Replaces what belongs to one run."""

    def __init__(self, seen: Observation) -> None:
        self.fixed = (
            (str(seen.tmp), "<tmp>"),
            (sys.prefix, "<venv>"),
            (str(ROOT), "<root>"),
        )
        self.port = re.compile(rf"\b{seen.port}\b")

    def __call__(self, text: str) -> str:
        for old, new in self.fixed:
            text = text.replace(old, new)
        text = self.port.sub("<given port>", text)
        for pattern, new in REPLACED:
            text = pattern.sub(new, text)
        return text

    def deep(self, value: Any) -> Any:
        """The same, inside JSON."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, list):
            return [self.deep(item) for item in value]
        if isinstance(value, dict):
            return {self(key): self.deep(item) for key, item in value.items()}
        return value


def normalise(seen: Observation) -> Flat:
    """Flatten an observation to `key -> value`, equal for two runs that are alike."""
    text = _Text(seen)
    folders = _RankFolders(seen)
    flat: Flat = {"children_left": list(seen.children_left), "ranks_left": list(seen.ranks_left)}
    if lasts := CASES[seen.case].lasts:
        as_meant = lasts[0] <= seen.seconds < lasts[1]
        flat["lasted"] = "as meant" if as_meant else f"{seen.seconds:.0f} s"
    for node, code in enumerate(seen.exits):
        flat[f"node{node}.exit"] = code if code >= 0 else 128 - code  # as a shell has it
        flat[f"node{node}.stdout"] = sorted(text(seen.stdout[node]).splitlines())
        flat |= {f"node{node}.stderr.{k}": v for k, v in _stderr(text(seen.stderr[node])).items()}
    for name, dump in seen.dumps.items():
        kind, place = name.split(".", 1)
        if kind == "rank":
            flat |= _rank(f"rank[{place}]", dump, seen, text, folders)
        else:
            if kind == "sum":
                dump.pop("env")  # type: ignore[attr-defined]
            flat[f"{kind}[{place}]"] = text.deep(dump)
    return flat | _files(seen, text, folders)


class _RankFolders:
    """Names each rank's log folder by the global rank, whichever rank a launcher names it by."""

    def __init__(self, seen: Observation) -> None:
        self._tmp = seen.tmp
        self._ranks: dict[str, str] = {}  # a rank's folder -> its global rank
        self._any_round: dict[tuple[str, str], str] = {}  # the run's folder, a name in attempts
        for dump in seen.dumps.values():
            env = dump.get("env", {}) if isinstance(dump, dict) else {}
            if env.get("TORCHELASTIC_ERROR_FILE") and "RANK" in env:
                attempt, own = os.path.split(self._folder(env))
                self._ranks[f"{attempt}/{own}"] = env["RANK"]
                self._any_round[os.path.dirname(attempt), own] = env["RANK"]

    def _folder(self, env: dict[str, str]) -> str:
        return os.path.dirname(os.path.join(self._tmp, "work", env["TORCHELASTIC_ERROR_FILE"]))

    def named_by(self, env: dict[str, str]) -> str:
        """Which of a rank's numbers its folder bears."""
        if not env.get("TORCHELASTIC_ERROR_FILE") or "RANK" not in env:
            return "none"
        name = os.path.basename(self._folder(env))
        if env["RANK"] == env["LOCAL_RANK"] == name:
            return "either"
        return {env["LOCAL_RANK"]: "local rank", env["RANK"]: "global rank"}.get(name, name)

    def __call__(self, path: str) -> str:
        """`path`, if it is such a folder or in one, as if all were named by the global rank."""
        parts = re.fullmatch(r"(.*?)/(attempt_\d+)/(\d+)(/.*)?", path)
        if parts is None:
            return path
        run, attempt, own, rest = parts.groups()
        whole = os.path.join(self._tmp, "work", run)
        rank = self._ranks.get(f"{whole}/{attempt}/{own}") or self._any_round.get((whole, own), own)
        return f"{run}/{attempt}/{rank}{rest or ''}"


def _files(seen: Observation, text: _Text, rank_folders: _RankFolders) -> Flat:
    """The runs' folders; what is below them, by name (of several nodes: all); what is beside."""
    found: dict[str, list[Any]] = {}
    folders: set[str] = set()
    beside: set[str] = set()
    for name, content in seen.files.items():
        placed = rank_folders(f"{seen.tmp}/{name}").removeprefix(f"{seen.tmp}/")
        inside = ATTEMPT.fullmatch(text(placed))
        value = None if content is None else _file(name, text(content))
        if inside:
            folders.add(inside[1])
            of_this_name = found.setdefault(f"log.{inside[2]}", [])
            if content is not None or not of_this_name:  # nodes may share folders, but not files
                of_this_name.append(value)
        elif name == "error.json":
            found["error_file"] = [value]
        elif content is not None:
            beside.add(text(name))
    flat: Flat = {k: v[0] if len(v) == 1 else sorted(v, key=repr) for k, v in found.items()}
    return flat | {"log_folders": sorted(folders), "log_beside": sorted(beside)}


def _stderr(stderr: str) -> dict[str, Any]:
    """What the ranks wrote, apart from what the launcher did: ranks mark lines with `@@`."""
    raised = TRACEBACK.findall(stderr)
    rest = LOST_STORE.sub("", TRACEBACK.sub("", stderr)).splitlines()
    return {
        "ranks": sorted(line for line in rest if WORKER_LINE.match(line)),
        "tracebacks": sorted(raised),
        "omp_banner": any(BANNER in line for line in rest),
        "launcher": sorted({line for line in rest if not WORKER_LINE.match(line)}),
    }


def _rank(at: str, dump: Any, seen: Observation, text: _Text, folders: _RankFolders) -> Flat:
    flat: Flat = {}
    parent = dump.pop("ppid")
    flat[f"{at}.parent"] = "launcher" if parent in seen.launcher_pids else "other"
    dump["fds"] = {
        fd: ATTEMPT.sub(r"<run folder>/\2", re.sub(r"\[\d+\]", "[]", text(folders(name))))
        for fd, name in dump["fds"].items()
    }
    env = dump.pop("env")
    flat[f"{at}.folder_named_by"] = folders.named_by(env)
    error_file = text(folders(env.get("TORCHELASTIC_ERROR_FILE", "")))
    env["TORCHELASTIC_ERROR_FILE"] = ATTEMPT.sub(r"<run folder>/\2", error_file)
    port = env.get("MASTER_PORT")
    if port is not None and port.isdigit() and int(port) not in (seen.port, 29500):
        env["MASTER_PORT"] = "<some port>"
    flat |= {f"{at}.env.{k}": text(v) for k, v in env.items()}
    flat |= {f"{at}.{k}": text.deep(v) for k, v in dump.items()}
    return flat


def _file(name: str, content: str) -> Any:
    """A log as text (sorted, where ranks share it); an error file as JSON without its time."""
    if "/filtered_" in name:
        return sorted(content.splitlines())
    if not name.endswith(".json"):
        return content
    try:
        found = json.loads(content.replace("<time>", "0"))
    except ValueError:
        return content
    return found


def compare(theirs: Flat, ours: Flat) -> list[Delta]:
    """Every key on which the two differ, in order."""
    return [
        Delta(key, theirs.get(key, ABSENT), ours.get(key, ABSENT))
        for key in sorted(theirs.keys() | ours.keys())
        if theirs.get(key, ABSENT) != ours.get(key, ABSENT)
    ]

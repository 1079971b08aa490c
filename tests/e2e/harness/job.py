"""One training run as a test sees it: launchers that are real processes, and what they leave to see.

A test waits for something that it can see and never for a time: lines that the ranks wrote, notes
of the journal, processes in /proc.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest

from elastic.agent.prctl import set_pdeathsig

from . import processes
from .processes import MARK, Process

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).parent / "scripts" / "rank.py"
DEADLINE = 150.0
"""Seconds after which a test stops to wait. Generous: it is no measurement, and half of what a test has."""
GLANCE = 0.01
FORK = "--rank-start=fork"
"""For a test that is not about how its ranks start: each that would import torch takes seconds of a core."""
HEAD = "Traceback (most recent call last):"
CHAIN = ("The above exception was the direct cause", "During handling of the above exception")
"""Python's words between a traceback and the one of what came of it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Told:
    """A line that a rank wrote; see scripts/rank.py."""

    kind: str
    rank: int
    round: int
    pid: int
    at: float
    """CLOCK_MONOTONIC."""
    fields: Mapping[str, Any]


@cache
def private_shm() -> bool:
    """Whether launchers can have a /dev/shm of their own, which shows exactly what they leave."""
    test = ("unshare", "-m", "true")
    return shutil.which("unshare") is not None and subprocess.run(test, check=False).returncode == 0


def tracebacks(said: str) -> list[str]:
    """Every traceback, down to the line that names the exception, with those that it was caused by. Each
    of its lines has the prefix that its head has; a launcher's line or another head in between belongs to
    somebody else.
    """
    lines = said.splitlines()
    found = []
    causes: dict[str, list[str]] = {}
    """By prefix, the lines of what the next one with it was caused by."""
    for number, line in enumerate(lines):
        prefix, head, _ = line.partition(HEAD)
        if not head:
            continue
        block = causes.pop(prefix, [])
        ended = False
        for follows in lines[number + 1 :]:
            if HEAD in follows or follows.startswith("elastic-run: "):
                continue
            if not ended:
                block.append(follows)
                ended = not follows.startswith(f"{prefix} ")
            elif follows.startswith(prefix) and (words := follows.removeprefix(prefix).strip()):
                if words.startswith(CHAIN):
                    causes[prefix] = block
                break
        if prefix not in causes:
            found.append("\n".join(block))
    return found


class Node:
    """One launcher and all that it started."""

    def __init__(self, job: "Job", name: str, process: "subprocess.Popen[bytes]") -> None:
        self.job = job
        self.name = name
        self.process = process

    @property
    def guardian(self) -> int:
        return self.process.pid

    def _forks(self) -> list[Process]:
        """The guardian's own children: agent and master, which look alike."""
        found = processes.children(self.guardian)
        return [p for p in found if "elastic.run" in p.command or "elastic-run" in p.command]

    def master(self) -> int:
        """Pid of the master, once it serves."""
        return self.job.wait_for(f"the master on {self.name}", self._find_master)

    def _find_master(self) -> int | None:
        found = [p.pid for p in self._forks() if processes.has_open(p.pid, "journal.db")]
        return found[0] if len(found) == 1 else None

    def agent(self) -> int:
        """Pid of the agent, once it has started something."""
        return self.job.wait_for(f"the agent on {self.name}", self._find_agent)

    def _find_agent(self) -> int | None:
        starters = ("elastic.agent.starters.spawner", "elastic-standby")
        for process in self._forks():
            own = processes.children(process.pid)
            if any(name in child.command for child in own for name in starters):
                return process.pid
        return None

    def part(self, title: str) -> int:
        """Pid of the agent's child whose command line has `title` in it, the oldest of them."""

        def find() -> int | None:
            agent = self._find_agent()
            found = processes.children(agent) if agent else []
            return next((p.pid for p in found if title in p.command), None)

        return self.job.wait_for(f"{title} on {self.name}", find)

    def said(self) -> str:
        """What the launcher and the ranks wrote to stderr so far."""
        return (self.job.folder / f"{self.name}.err").read_text(errors="replace")

    def printed(self) -> str:
        return (self.job.folder / f"{self.name}.out").read_text(errors="replace")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        """Wait for the launcher's end; negative for a signal."""
        try:
            return self.process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self.job.fail(f"the launcher {self.name} does not end")


class Job:
    """Everything of it lies in one folder. The endpoint's address is on loopback and the job's own,
    so that no other test can have the port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []
        self.address = "127." + ".".join(str(1 + secrets.randbelow(253)) for _ in range(3))
        self.port = 29400
        self.shm = folder / "shm"
        self.shm.mkdir()
        self._shared = set(os.listdir("/dev/shm"))
        self._told = defaultdict[tuple[str, int | None, int | None], list[Told]](list)
        """By kind, round and rank; None: of all. A soak tells a hundred thousand lines."""
        self._heard = 0
        """Bytes of told.jsonl that are in `_told`."""

    # --- starting ----------------------------------------------------------------------------

    def start(
        self,
        *flags: str,
        script: Sequence[str] = (),
        nproc: int = 2,
        nodes: str = "1",
        name: str = "",
        environ: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        entry: Sequence[str] = (),
        log_level: str = "INFO",
        console: int | None = None,
    ) -> Node:
        """Start a launcher. script: arguments of rank.py; entry: another script in its place;
        console: a descriptor for all that it shows, in place of files."""
        name = name or f"node{len(self.nodes)}"
        meeting = ("--rdzv-backend", "c10d", "--rdzv-id", "job")
        command = (
            *(sys.executable, "-m", "elastic.run", "--nproc-per-node", str(nproc)),
            *("--nnodes", nodes, *meeting, "--rdzv-endpoint", f"{self.address}:{self.port}"),
            *("--log-dir", str(self.folder / "logs"), "--node-id", name),
            *("--precheck", "off", *flags),  # it takes seconds, and is what few tests are about
            *(entry or (str(SCRIPT), str(self.folder), *script)),
        )
        return self.launch(name, command, environ or {}, prefix, log_level, console)

    def launch(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        prefix: Sequence[str] = (),
        log_level: str = "INFO",
        console: int | None = None,
    ) -> Node:
        """Start a launcher by its whole command line."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))}
        variables |= {
            MARK: str(self.folder),
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "ELASTIC_LOGLEVEL": log_level,
            "TMPDIR": str(self.folder),
            **environ,
        }
        if private_shm():
            bind = f'mount --bind {self.shm} /dev/shm && exec "$@"'
            prefix = (*prefix, "unshare", "-m", "sh", "-c", bind, "sh")
        with (
            open(self.folder / f"{name}.out", "ab") as out,
            open(self.folder / f"{name}.err", "ab") as err,
        ):
            process = subprocess.Popen(
                (*prefix, *command),
                stdin=subprocess.DEVNULL,
                stdout=out if console is None else console,
                stderr=err if console is None else console,
                env=variables,
                cwd=self.folder,
                start_new_session=True,
                # A test run that is killed leaves no job; noqa: it is one call of libc's.
                preexec_fn=set_pdeathsig,  # noqa: PLW1509
            )
        node = Node(self, name, process)
        self.nodes.append(node)
        return node

    # --- what can be seen --------------------------------------------------------------------

    def told(self, kind: str, *, round: int | None = None, rank: int | None = None) -> list[Told]:
        """Lines of that kind that ranks wrote so far, oldest first."""
        self._listen()
        return self._told[kind, round, rank].copy()

    def _listen(self) -> None:
        """Read on where the last look ended; a thousand rounds tell megabytes."""
        try:
            with open(self.folder / "told.jsonl", "rb") as file:
                file.seek(self._heard)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        self._heard += len(whole) + len(end)
        for line in whole.splitlines():
            fields: dict[str, Any] = json.loads(line)
            about = {key: fields.pop(key) for key in ("kind", "rank", "round", "pid", "at")}
            told = Told(fields=fields, **about)
            for key in product([told.kind], [told.round, None], [told.rank, None]):
                self._told[key].append(told)

    def round(self) -> int:
        """Number of the newest round in which a rank started."""
        return max((line.round for line in self.told("start")), default=0)

    def events(self) -> list[str]:
        """Reasons in the journal, oldest first: what `elasticctl events` shows."""
        found: list[str] = []
        for path in sorted((self.folder / "logs").glob("*/journal.db")):
            with (
                contextlib.suppress(sqlite3.Error),
                contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database,
            ):
                rows = database.execute("select job, kind, reason from notes order by seq")
                found += [f"{job:9.3f} {kind}: {reason}" for job, kind, reason in rows]
        return found

    def report(self) -> dict[str, Any]:
        """The report that the master wrote at the job's end."""
        path = self.folder / "logs" / "job" / "report.json"
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    def left(self) -> list[Process]:
        return processes.belonging_to(self.folder)

    # --- waiting -----------------------------------------------------------------------------

    def wait_for(self, what: str, look: Callable[[], T | None]) -> T:
        """Look until there is something to see; fails the test with all that is known."""
        deadline = time.monotonic() + DEADLINE
        while True:
            found = look()
            if found is not None and found is not False:
                return found
            if time.monotonic() > deadline:
                self.fail(f"waited {DEADLINE:g} s for {what}")
            if self.nodes and all(n.process.poll() is not None for n in self.nodes):
                found = look()
                if found is not None and found is not False:
                    return found
                codes = [n.process.returncode for n in self.nodes]
                self.fail(f"every launcher ended (exit {codes}) while waiting for {what}")
            time.sleep(GLANCE)

    def wait_for_steps(self, world: int, *, after: int = 0, count: int = 1) -> int:
        """Until all `world` ranks of one round newer than `after` did `count` steps; that round."""

        def look() -> int | None:
            number = self.round()
            if number <= after:
                return None
            ready = all(
                len(self.told("step", round=number, rank=rank)) >= count for rank in range(world)
            )
            return number if ready else None

        return self.wait_for(f"{count} steps of {world} ranks in a round after {after}", look)

    def wait_for_more_steps(self, number: int, world: int, count: int = 3) -> None:
        """Until every rank of round `number` did `count` steps more than now."""
        self.wait_for_more_steps_of(number, *range(world), count=count)

    def wait_for_more_steps_of(self, number: int, *ranks: int, count: int = 3) -> None:
        """The same for some of its ranks."""
        had = {rank: len(self.told("step", round=number, rank=rank)) for rank in ranks}
        self.wait_for(
            f"{count} more steps of ranks {ranks} in round {number}",
            lambda: all(
                len(self.told("step", round=number, rank=rank)) >= had[rank] + count
                for rank in ranks
            ),
        )

    def wait_for_event(self, text: str) -> str:
        return self.wait_for(
            f"an event with {text!r}", lambda: next((e for e in self.events() if text in e), None)
        )

    def rank(self, number: int, rank: int) -> int:
        """Pid of a rank of round `number`, which may yet be starting."""
        started = self.wait_for(
            f"rank {rank} of round {number}",
            lambda: self.told("start", round=number, rank=rank) or None,
        )
        return started[-1].pid

    def kill(self, number: int, rank: int, with_signal: int = signal.SIGKILL) -> None:
        """Signal a rank of round `number`, which must be there."""
        try:
            os.kill(self.rank(number, rank), with_signal)
        except ProcessLookupError:
            self.fail(f"rank {rank} of round {number} ended before it could be killed")

    def ctl(self, *verb: str) -> str:
        """What elasticctl answers, of a job that runs or is over."""
        done = self._ctl(verb)
        if done.returncode:
            self.fail(f"elasticctl {' '.join(verb)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def ctl_fails(self, *verb: str) -> str:
        """What it says where it refuses, in one line."""
        done = self._ctl(verb)
        if not done.returncode or done.stderr.count("\n") != 1:
            self.fail(f"elasticctl {' '.join(verb)} ended with {done.returncode}: {done.stderr}")
        return done.stderr

    def _ctl(self, verb: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "elastic.ctl", "--dir", str(self.folder / "logs"), *verb]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    # --- the end -----------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the ranks come to their end."""
        (self.folder / "finish").touch()

    def ends(self, *codes: int) -> None:
        """Wait for every launcher's end, and see that the job ended right and left nothing.

        codes: the exit codes of the launchers in their order; one stands for all.
        """
        wanted = codes * len(self.nodes) if len(codes) == 1 else codes
        seen = tuple(node.exit_code() for node in self.nodes)
        if seen != wanted:
            self.fail(f"launchers ended with {seen}, not with {wanted}")
        self.assert_nothing_left()
        if any(self.own_tracebacks(node) for node in self.nodes):
            self.fail("a launcher printed a traceback of its own")

    def assert_nothing_left(self, *, soon: bool = False) -> None:
        """No process, no shared memory. soon: wait for it, where nobody was there to end them."""
        if soon:
            self.wait_for("the end of every process", lambda: not self.left() or None)
        if left := self.left():
            self.fail(f"processes are left:\n{processes.table(left)}")
        if shared := self.shared():
            self.fail(f"shared memory is left: {sorted(shared)}")

    def shared(self) -> set[str]:
        """Shared memory of the job's, by name."""
        if private_shm():
            return set(os.listdir(self.shm))
        return set(os.listdir("/dev/shm")) - self._shared

    def own_tracebacks(self, node: Node) -> list[str]:
        """Tracebacks on the launcher's stderr in which no script has a part: neither the test's nor an
        example, each of which may fail."""
        users = (
            str(SCRIPT.parent),
            str(ROOT / "examples"),
            str(ROOT / "tests" / "trainer"),
            f'File "{self.folder}',
        )
        blocks = tracebacks(node.said())
        return [b[:3000] for b in blocks if not any(name in b for name in users)]

    def fail(self, why: str) -> NoReturn:
        pytest.fail(f"{why}\n{self.dump()}", pytrace=True)

    def dump(self) -> str:
        """All that is known, for a test that failed."""
        parts = [f"job in {self.folder}", "--- processes", processes.table(self.left())]
        for node in self.nodes:
            state = node.process.poll()
            parts += [f"--- {node.name}: {'runs' if state is None else f'exit {state}'}"]
            parts += [node.said()[-6000:], node.printed()[-2000:]]
        parts += ["--- events", *self.events()[-60:], "--- told"]
        with contextlib.suppress(OSError):
            parts += (self.folder / "told.jsonl").read_text().splitlines()[-30:]
        return "\n".join(parts)

    def close(self) -> None:
        """End whatever is left."""
        for _ in range(100):
            processes.kill(*(n.guardian for n in self.nodes if n.process.poll() is None))
            if not (left := self.left()):
                break
            processes.kill(*(p.pid for p in left if p.state == "T"), number=signal.SIGCONT)
            processes.kill(*(p.pid for p in left))
            time.sleep(GLANCE)
        for node in self.nodes:
            node.process.wait()

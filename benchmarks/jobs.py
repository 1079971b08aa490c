"""Start a launcher on a script that notes events, follow the events, kill what one wants killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
LOOK_S = 0.01  # between looks at the events; their own time stamps do not depend on it


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher is a name and a command prefix, which takes torchrun's options."""

    name: str
    prefix: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Event:
    """What a rank noted: it began (`start`), made its model (`ready`), finished a `step`."""

    kind: str
    at: float
    node: int
    rank: int
    pid: int
    world: int
    step: int


class Job:
    """One job: launchers (one a node) and their processes, known by a variable, in one folder."""

    def __init__(self) -> None:
        self.out = Path(tempfile.mkdtemp(prefix="bench_"))
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.started: dict[int, float] = {}
        self._seen: list[Event] = []
        self._offset = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill_processes()
        for node in self.nodes.values():
            node.wait()
        shutil.rmtree(self.out, ignore_errors=True)

    def launch(self, launcher: Launcher, args: Sequence[str], node: int = 0) -> None:
        """Start one node's launcher; its console goes to a file in the job's folder."""
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "PET_"))},
            **dict(launcher.env),
            "BENCH_OUT": str(self.out),
            "BENCH_NODE": str(node),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TMPDIR": str(self.out),
        }
        with (self.out / f"console.{node}").open("ab") as console:
            self.started[node] = time.monotonic()
            self.nodes[node] = subprocess.Popen(
                [*launcher.prefix, *args],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self.out,
                start_new_session=True,
            )

    def events(self) -> list[Event]:
        """All events so far, in the order in which they were written."""
        path = self.out / "events"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            for line in whole.decode().splitlines():
                kind, at, node, rank, pid, world, step = line.split()
                self._seen.append(
                    Event(kind, float(at), int(node), int(rank), int(pid), int(world), int(step))
                )
        return self._seen

    def ended(self) -> bool:
        """Whether every launcher has ended."""
        return all(node.poll() is not None for node in self.nodes.values())

    def until(self, done: Callable[[], bool], seconds: float) -> str | None:
        """Wait; None once `done`, else why not, in words."""
        end = time.monotonic() + seconds
        while not done():
            if self.ended():
                codes = [node.returncode for node in self.nodes.values()]
                return f"the job ended, exit {codes}: {self.last_words()}"
            if time.monotonic() > end:
                return f"nothing within {seconds:.0f} s"
            time.sleep(LOOK_S)
        return None

    def first_each_rank(self, kind: str, without: set[int], after: float) -> list[Event] | None:
        """Once a whole world of processes not in `without` has noted `kind`: each rank's first."""
        first: dict[int, Event] = {}
        for event in self.events():
            if event.kind == kind and event.pid not in without and event.at > after:
                first.setdefault(event.rank, event)
        whole = first and len(first) >= max(event.world for event in first.values())
        return list(first.values()) if whole else None

    def pids(self) -> set[int]:
        """Every rank process there has been."""
        return {event.pid for event in self.events()}

    def kill_processes(self, node: int | None = None, *, launcher_too: bool = True) -> None:
        """SIGKILL everything of the job, or of one node, and come back when it is gone.

        Without the launcher: once all that it has started until now, which it may start again.
        """
        own = [p.pid for n, p in self.nodes.items() if node in (None, n) and p.poll() is None]
        if not launcher_too:
            for pid in set(self._marked(node)) - set(own):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        for pid in own:
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while (left := self._marked(node)) and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for process in self.nodes.values():
                process.poll()
            time.sleep(0.001)

    def _marked(self, node: int | None) -> list[int]:
        """Living processes with the job's folder (and the node's number) in their environment."""
        wanted = {f"BENCH_OUT={self.out}".encode()}
        wanted |= set() if node is None else {f"BENCH_NODE={node}".encode()}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def last_words(self) -> str:
        """The last line that looks like an error on any console."""
        lines = [
            line.strip()
            for path in sorted(self.out.glob("console.*"))
            for line in path.read_text(errors="replace").splitlines()
            if "error" in line.lower()
        ]
        return lines[-1][:200] if lines else "no error on the console"

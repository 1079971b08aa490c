"""What the demo knows of its job: told by the master, and read in rank 0's log."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elastic.proto import master_pb2 as pb
from elastic.proto.calls import MasterClient
from elastic.proto.errors import ElasticError
from elastic.proto.security import Security

LOOK = 0.2
"""Seconds between looks at status and log."""
_STEP = re.compile(r" \[.*\] iteration +(\d+)/ .*\| lm loss: ([\d.E+-]+) ")
_RESUMED = re.compile(r"resumed from step (\d+)$")

Kind = Literal["demo", "master", "fault", "recovered", "trouble"]


class JobEnded(Exception):
    """The job was over before the demo was; the message says how it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One thing that happened."""

    at: float
    """Seconds since the demo began."""
    kind: Kind
    """Who did it or says it."""
    text: str
    """One line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """How long an interruption lasted and what it cost, in the words of the job's report."""

    cause: str
    """The master's verdict."""
    seconds: float
    """Until the next finished step."""
    step_before: int
    """Last step known to be finished before it."""
    step_after: int
    """First step finished after it; 0 where the report does not tell."""


class Story:
    """All that was seen so far; whoever waits for something is woken by every change."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.notes: list[Note] = []
        self.losses: list[tuple[int, float]] = []
        """(step, loss) as rank 0 printed them; a step that was computed twice is there twice."""
        self.step = 0
        """The last one that rank 0 told of."""
        self.resumed = 0
        """The step that rank 0 last began from."""
        self.reached = 0
        """The last step that rank 0 told of before that."""
        self.status = pb.Status()
        self.over = ""
        """How the job ended, once its master's launcher has."""
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self.began

    def note(self, kind: Kind, text: str) -> None:
        """Add a line to the story."""
        self.notes.append(Note(at=self.now(), kind=kind, text=text))
        self.touch()

    def touch(self) -> None:
        """Wake who waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done`, which is asked after every change. Raises JobEnded."""
        while not done():
            if self.over:
                raise JobEnded(self.over)
            await self._changed.wait()

    def pid_of(self, rank: int) -> int:
        """The process that is `rank` now, or 0."""
        found = (r.pid for node in self.status.nodes for r in node.ranks if r.rank == rank)
        return next(found, 0)

    @property
    def report(self) -> dict[str, Any]:
        """The job's report as it would be now."""
        found: dict[str, Any] = json.loads(self.status.report_json or "{}")
        return found

    @property
    def interruptions(self) -> list[dict[str, Any]]:
        """Those of the report, oldest first."""
        found: list[dict[str, Any]] = self.report.get("interruptions", [])
        return found

    def read(self, lines: Iterable[str]) -> None:
        """Take in lines of rank 0's log."""
        for line in lines:
            if match := _RESUMED.match(line):
                self.reached, self.resumed = self.step, int(match[1])
                self.step = self.resumed
            elif match := _STEP.match(line):
                self.step = int(match[1])
                self.losses.append((self.step, float(match[2])))
        self.touch()


def recovery(interruptions: list[dict[str, Any]], first: int) -> Recovery | None:
    """What became of interruption number `first`; None while no step was finished after it.

    One that is interrupted again on the way to its first step ends with the one that is not.
    """
    if len(interruptions) <= first:
        return None
    begun, ended = interruptions[first], interruptions[-1]
    for ended in interruptions[first:]:
        if ended["downtime_seconds"] is not None:
            break
    if ended["downtime_seconds"] is None:
        return None
    return Recovery(
        cause=str(begun["cause"]),
        seconds=float(ended["at"] + ended["downtime_seconds"] - begun["at"]),
        step_before=int(begun["step_before"]),
        step_after=int(ended["step_after"]),
    )


# --- where it comes from -------------------------------------------------------------------------


async def follow_master(story: Story, address: str, security: Security) -> None:
    """Keep `story.status` fresh and note what the master decides, until cancelled."""
    async with MasterClient(address, security) as master, asyncio.TaskGroup() as tasks:
        tasks.create_task(_follow_status(story, master))
        tasks.create_task(_follow_events(story, master))


async def _follow_status(story: Story, master: MasterClient) -> None:
    while True:
        with contextlib.suppress(ElasticError):  # not there yet, or no longer
            story.status = await master.status()
            story.touch()
        await asyncio.sleep(LOOK)


async def _follow_events(story: Story, master: MasterClient) -> None:
    after = 0
    while True:
        with contextlib.suppress(ElasticError):
            async for event in master.events(after, follow=True):
                after = event.sequence
                story.note("master", event.reason)
        await asyncio.sleep(LOOK)


async def follow_log(story: Story, log: "RankLog") -> None:
    """Read what rank 0 prints, round after round, until cancelled."""
    while True:
        story.read(log.new_lines())
        await asyncio.sleep(LOOK)


class RankLog:
    """Rank 0's stdout, whose file is another one in every round."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._read: dict[Path, int] = {}

    def new_lines(self) -> list[str]:
        """Whole lines that were not there before, with their ends; an unfinished one waits."""
        found = []
        for path in sorted(self._logs.glob("attempt_*/0/stdout.log"), key=_attempt):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
            found += (whole + end).decode(errors="replace").splitlines(keepends=True)
        return found


def _attempt(path: Path) -> int:
    return int(path.parents[1].name.removeprefix("attempt_"))

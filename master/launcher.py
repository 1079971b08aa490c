"""What a master needs from a cluster that gives it nodes, and what such a launcher needs from the master.

A launcher tells the master facts, as events (`Removed`, `Withdrawn`, `Resized`, `FailAsked`,
`RestartAsked`, `DrainAsked`), and reads what it decided; neither waits for the other.
"""

from dataclasses import dataclass
from typing import Protocol

from elastic.master.events import Event
from elastic.master.state import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The newest steps of the job's checkpoint; None: there is none, or nobody has told of it yet."""

    memory: int | None = None
    """Whole in the nodes' memory."""
    storage: int | None = None


class Master(Protocol):
    """As a launcher sees it."""

    @property
    def job(self) -> Job: ...

    @property
    def saved(self) -> Saved: ...
    @property
    def metrics(self) -> str:
        """What the script said of its newest step, a line of JSON; empty: nothing."""

    def now(self) -> float:
        """Job time."""

    def fold(self, event: Event) -> None:
        """Tell it something; journaled, and acted on, before this returns."""

    async def changed(self, timeout: float) -> None:
        """Until the job may have changed, or so many seconds are over."""


class Launcher(Protocol):
    async def run(self, master: Master) -> None:
        """Give the job its nodes, until the job has a result; cancelled when the master ends."""

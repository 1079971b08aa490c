"""Ranks of rounds that are over, until the last process of theirs is gone."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from elastic.agent import children
from elastic.agent.ranks import Ranks

log = logging.getLogger(__name__)


def time_left(grace: float, number: int) -> str:
    """What a person who sent a signal wants to know."""
    again = "; ^C again kills them now" if number == signal.SIGINT else ""
    return f", with up to {grace:g} s for the ranks{again}" if grace else ""


class Retiring:
    """Ends ranks, and all that they started, in tasks of the agent's."""

    def __init__(
        self,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        sweep: Callable[[], Awaitable[None]],
        give_up: Callable[[], None],
    ) -> None:
        """sweep: ends orphans; give_up: called where a process does not end on SIGKILL."""
        self._spawn = spawn
        self._sweep = sweep
        self._give_up = give_up
        self._interrupts = 0
        self._tasks: dict[asyncio.Task[None], Ranks] = {}
        self.stuck: set[int] = set()
        """Pids that SIGKILL did not end; nobody waits for them again."""
        self.unkillable = ""
        """What is known of the first of them."""

    def begin(self, ranks: Ranks, grace: float, number: int) -> None:
        """Signal them, and SIGKILL them after `grace` seconds."""
        task = self._spawn(self._stop(ranks, 0.0 if self._interrupts > 1 else grace, number))
        self._tasks[task] = ranks
        task.add_done_callback(self._tasks.pop)

    def give_time(self, grace: float) -> None:
        """The node leaves: ranks that were told to stop before get its grace, if they had less."""
        for ranks in self._tasks.values():
            ranks.give_time(grace)

    async def over(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def hear(self, number: int) -> None:
        """A signal to the launcher; the second ^C gives ranks no more time.

        Only a terminal is impatient: Slurm and systemd may send SIGTERM twice, or SIGINT after it.
        """
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            for ranks in self._tasks.values():
                ranks.send_signal(signal.SIGKILL)

    @property
    def pids(self) -> set[int]:
        return {pid for ranks in self._tasks.values() for pid in ranks.pids.values()}

    def __bool__(self) -> bool:
        return bool(self._tasks)

    async def _stop(self, ranks: Ranks, grace: float, number: int) -> None:
        left = await ranks.stop(grace, number)
        if not left:
            await self._sweep()
            return
        self.stuck.update(rank.pid for rank in left)
        self.unkillable = await _words(left[0].pid, f" of rank {left[0].number}")
        log.error("%s", self.unkillable)
        self._give_up()

    async def leave_behind(self, pids: Iterable[int]) -> None:
        """What a sweep could not end: nothing of a rank's, so the node goes on without it."""
        for pid in pids:
            self.stuck.add(pid)
            log.error("%s", await _words(pid))


async def _words(pid: int, whose: str = "") -> str:
    stack = await children.stuck_at(pid)
    return f"process {pid}{whose} does not end on SIGKILL; it sits in the kernel at: {stack}"

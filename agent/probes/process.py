"""One probe's process, in a session of its own. That it hangs, crashes or talks nonsense is an answer
too, with what there is to see of it. What overruns is killed; what cannot be is left behind."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from elastic.agent import boot, children
from elastic.agent.probes.answers import LONGEST, Answer, decode
from elastic.agent.tasks import threads
from elastic.proto import signals
from elastic.proto.errors import CodecError

GRACE = 1.0
"""Seconds for a killed process to be gone."""
STALL = 5.0
"""Seconds by which we notice a deadline too late where we were stopped ourselves, a suspended node say."""
TAIL = 4096
"""Bytes of the end of its standard error."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For programs of which several run on a machine; what is set stays."""

End = Literal["", "late", "stopped", "stuck", "died", "nonsense"]


class Program:
    """Answers come one a line; once one did not come, none comes any more."""

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        environ: Mapping[str, str],
        fds: Sequence[int] = (),
        python: str = sys.executable,
    ) -> None:
        """Start it. module: of `elastic.agent.probes`; fds: that it inherits, as numbers 3, 4, ...; python: which may
        have a torch where ours has none."""
        self.end: End = ""
        """How it ended before its time."""
        self.left_behind = False
        """No signal ended it."""
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        theirs_in, self._stdin = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._stdout = os.fdopen(ours_out, "rb", 0)
        args = ["--parent", str(os.getpid()), *args]
        command = boot.command(python, f"elastic.agent.probes.{module}", *args)
        streams = (theirs_in, theirs_out, self._errors)
        # Off the numbers that they get, so that none overwrites another.
        high = [os.dup(fd) for fd in (*streams, *fds)]
        try:
            moves = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(high)]
            self.pid = os.posix_spawn(
                command[0], command, dict(environ), file_actions=moves, setsid=True,
                setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM),
            )  # fmt: skip
        except OSError:
            os.close(self._errors)
            os.close(self._stdin)
            self._stdout.close()
            raise
        finally:
            for fd in (*high, theirs_in, theirs_out):
                os.close(fd)
        self._ended = children.watch(self.pid)
        self._reader = asyncio.StreamReader(limit=LONGEST)
        self._transport: asyncio.BaseTransport | None = None

    def say(self, line: str) -> None:
        """One line to its standard input; a dead one is known by the answer that does not come."""
        with contextlib.suppress(OSError):
            os.write(self._stdin, f"{line}\n".encode())

    async def answer(self, probe: str, timeout: float) -> Answer:
        """Its next, which must be about `probe`; another in its place if it does not come in time."""
        line = await self.line(probe, timeout)
        if isinstance(line, Answer):
            return line
        try:
            said = decode(line)
        except CodecError as error:
            return await self._nonsense(probe, str(error))
        if said.probe not in (probe, probe.removesuffix("_together")):
            return await self._nonsense(probe, f"it answered for {said.probe}")
        return replace(said, probe=probe)

    async def line(self, probe: str, timeout: float) -> bytes | Answer:
        """What it prints next; what is wrong if nothing comes."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            self._transport, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(self._reader), self._stdout
            )
        began = loop.time()
        try:
            async with asyncio.timeout(timeout):
                line = await self._reader.readline()
        except TimeoutError:
            if loop.time() > began + timeout + STALL:  # so was the probe: it gets its time again
                return await self.line(probe, timeout)
            return await self._overrun(probe, timeout)
        except ValueError:
            return await self._nonsense(probe, f"it printed a line of more than {LONGEST} bytes")
        return line or await self._death(probe)

    async def only_answer(self, probe: str, timeout: float) -> Answer:
        """Its one answer, after which there must be nothing; then it is ended."""
        said = await self.answer(probe, timeout)
        if not self.end:
            # It has answered: how long it takes to go is no finding.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE):
                    if rest := await self._reader.read(100):
                        said = await self._nonsense(probe, f"after its answer it printed {rest!r}")
        await self.close()
        return said

    async def close(self, grace: float = GRACE) -> None:
        """End it, and wait for that so many seconds at most."""
        if not self._ended.done():  # else it is reaped, and the number may be another's
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        await asyncio.wait([self._ended], timeout=grace)
        self.left_behind = not self._ended.done()
        for fd in {self._stdin, self._errors} - {-1}:
            os.close(fd)
        self._stdin = self._errors = -1
        if self._transport is not None:
            self._transport.close()
        self._stdout.close()

    # --- no answer -------------------------------------------------------------------------------

    async def _overrun(self, probe: str, timeout: float) -> Answer:
        tasks, said = threads(self.pid), self._said()
        states = {task.state for task in tasks.values()}
        held = next((tid for tid, task in tasks.items() if task.state == "D"), self.pid)
        where = await children.stuck_at(held)
        await self.close()
        if self.left_behind or "D" in states:
            where = await children.stuck_at(held) if self.left_behind else where
            self.end, words = "stuck", f"it is stuck in the kernel, in {where}"
        elif states & {"T", "t"}:
            self.end, words = "stopped", "it was stopped by a signal"
        else:
            self.end, words = "late", "it runs on" if "R" in states else "it waits"
        if self.left_behind:
            words += "; it could not be killed, and is left behind"
        what = f"no answer in {timeout:g} s: process {self.pid}: {words}{said}"
        return Answer(probe=probe, ok=False, what=what)

    async def _death(self, probe: str) -> Answer:
        """It closed its standard output."""
        await asyncio.wait([self._ended], timeout=GRACE)
        said = self._said()
        self.end = "died"
        if not self._ended.done():
            how = "closed its output without an answer"
        elif (code := self._ended.result()) < 0:
            how = f"was killed by {signals.name(-code)}"
        else:
            how = f"ended with exit code {code} and no answer"
        await self.close()
        return Answer(probe=probe, ok=False, what=f"its process {how}{said}")

    async def _nonsense(self, probe: str, what: str) -> Answer:
        self.end = "nonsense"
        said = self._said()
        await self.close()
        return Answer(probe=probe, ok=False, what=what + said)

    def _said(self) -> str:
        """The last line of its standard error."""
        size = os.fstat(self._errors).st_size
        lines = (
            os.pread(self._errors, TAIL, max(0, size - TAIL)).decode(errors="replace").split("\n")
        )
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"; its last words: {last[:300]}" if last else ""

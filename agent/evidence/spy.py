"""py-spy: reads stacks out of another process's memory, which does not notice."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

from elastic.agent import children
from elastic.proto import looks
from elastic.proto.looks import Thread

_LONGEST = 4 << 20
"""Bytes of its answer; 64 threads of 100 frames are 2 MB."""


class SpyFailed(Exception):
    """Why py-spy told nothing, in one line."""


@cache
def executable() -> str | None:
    """Where the py-spy that belongs to this interpreter lies; another's on the PATH would not be ours."""
    candidates = [Path(sys.executable).parent / "py-spy"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("py-spy") or []
        candidates[:0] = [Path(str(f.locate())).resolve() for f in files if f.name == "py-spy"]
    return next((str(path) for path in candidates if os.access(path, os.X_OK)), None)


async def dump(pid: int, *, native: bool, deadline: float, running: set[int]) -> tuple[Thread, ...]:
    """The threads of a process that run Python. Raises SpyFailed, at `deadline` (the loop's time) at the latest.

    native: with the calls of libraries, for which py-spy stops the process for some tenths of a
    second. running: pids of ours, for as long as they are somebody's to reap.
    """
    program = executable()
    if program is None:
        raise SpyFailed("py-spy is not installed")
    mode = "--native" if native else "--nonblocking"
    with contextlib.ExitStack() as opened:
        out, err = (os.memfd_create(f"elastic-py-spy-{name}") for name in ("out", "err"))
        opened.callback(os.close, out)
        opened.callback(os.close, err)
        code = await _run(
            [program, "dump", "--json", mode, "--pid", str(pid)], out, err, deadline, running
        )
        if code is None:
            if native:
                # It may have been killed between its SIGSTOP and its detaching, which leaves the
                # process stopped; who was stopped before is not looked at in this way.
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            raise SpyFailed("py-spy took too long")
        if code != 0:
            first = os.pread(err, 1000, 0).decode(errors="replace").strip().partition("\n")[0]
            raise SpyFailed(f"py-spy: {looks.text(first.removeprefix('Error: '))}")
        text = os.pread(out, _LONGEST + 1, 0)
    if len(text) > _LONGEST:
        raise SpyFailed("py-spy had too much to tell")
    return parse(text, pid)


async def _run(
    command: list[str], out: int, err: int, deadline: float, running: set[int]
) -> int | None:
    """Its exit code; None if it did not end in time."""
    try:
        spy = _spawn(command, out, err)
    except OSError as error:
        raise SpyFailed(f"py-spy does not start: {error.strerror}") from error
    running.add(spy)
    ended = children.watch(spy)
    ended.add_done_callback(lambda _: running.discard(spy))
    try:
        async with asyncio.timeout_at(deadline):
            return await asyncio.shield(ended)
    except TimeoutError:
        return None
    finally:
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(spy, signal.SIGKILL)


def _spawn(command: list[str], out: int, err: int) -> int:
    return os.posix_spawn(
        command[0],
        command,
        {"RUST_BACKTRACE": "0"},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, out, 1),
            (os.POSIX_SPAWN_DUP2, err, 2),
        ],
        setpgroup=0,
        setsigmask=(),
        setsigdef=(signal.SIGPIPE, signal.SIGINT, signal.SIGTERM),
    )


def parse(text: bytes, pid: int) -> tuple[Thread, ...]:
    """What py-spy 0.4 writes as JSON; the main thread first. Raises SpyFailed."""
    try:
        told: Any = json.loads(text)
        threads = [
            Thread(
                tid=thread["os_thread_id"] or 0,
                name=looks.text(thread["thread_name"]),
                active=bool(thread["active"]),
                gil=bool(thread["owns_gil"]),
                frames=looks.cut(
                    [looks.frame(f["name"], f["filename"], f["line"]) for f in thread["frames"]]
                ),
            )
            for thread in told
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SpyFailed("py-spy wrote what is not known here") from error
    if not threads:
        raise SpyFailed("py-spy found no threads")
    return looks.fit(threads, pid)

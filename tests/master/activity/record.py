"""Makes the stacks beside it, of real processes that wait or work: `python -m tests.master.activity.record [NAME ...]`.

Each program is started as it is in `programs.py`, twice as ranks of a Gloo group where it says so, and
looked at as the agent does, once it has been where it is to be for some looks. What differs between
machines (where Python and the program lie) is taken out.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic.agent.evidence.look import Looker
from elastic.proto import codec, looks
from elastic.proto.looks import Look
from tests.master.activity.programs import PROGRAMS, Program

HERE = Path(__file__).parent
_PATIENCE = 90.0
_STAYS = 8
"""Looks."""


async def look(pids: dict[int, int]) -> tuple[Look, ...]:
    return await Looker().look(pids, deadline=asyncio.get_running_loop().time() + _PATIENCE)


def start(program: Program, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Its ranks; each has written a line when this returns."""
    script = folder / "train.py"
    script.write_text(program.code)
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environ |= {
        "STORE": str(folder / "store"),
        "FOLDER": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environ, "RANK": str(rank), "WORLD_SIZE": str(program.ranks)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        for rank in range(program.ranks)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        if not rank.stdout.readline():
            end(ranks)
            raise RuntimeError("a rank ended before it was ready")
    return ranks


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
        rank.communicate()


def settled(pid: int, program: Program) -> Look:
    """A look at its main thread in one of the functions, where it has stayed for some looks if it is to."""
    before: list[tuple[str, ...]] = []
    for _ in range(400):
        (found,) = asyncio.run(look({0: pid}))
        names = tuple(looks.bare(frame.function) for frame in looks.telling(found))
        before.append((found.state, *names))
        stayed = len(before) >= _STAYS and len(set(before[-_STAYS:])) == 1
        if set(names) & set(program.within) and (stayed or not program.stays):
            return found
        if found.state in looks.ENDED:
            break
    raise RuntimeError(f"never in {program.within}: {found}")


def anonymous(found: Look, folder: Path) -> str:
    text = codec.dumps(found)
    prefix = re.escape(sys.prefix)
    text = re.sub(rf"{prefix}/lib/python[0-9.]+/site-packages", "/venv/site-packages", text)
    text = re.sub(rf"{re.escape(sys.base_prefix)}/lib/python[0-9.]+", "/usr/lib/python", text)
    return text.replace(str(folder), "/job")


class Ranks:
    """A program's ranks, running; rank 0 is the one to look at."""

    def __init__(self, name: str, folder: Path) -> None:
        self._program = PROGRAMS[name]
        self._ranks = start(self._program, folder)

    def settle(self) -> Look:
        """A look at rank 0 once it is where it should be, and what happens to it has happened."""
        pid = self._ranks[0].pid
        if self._program.then is not None:
            settled(pid, self._program)
            self._program.then(pid)
        return settled(pid, self._program)

    def end(self) -> None:
        end(self._ranks)


def record(name: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        ranks = Ranks(name, folder)
        try:
            found = ranks.settle()
        finally:
            ranks.end()
        told = json.loads(anonymous(found, folder))
    (HERE / f"{name}.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    for name in sys.argv[1:] or PROGRAMS:
        record(name)
        print(name)


if __name__ == "__main__":
    main()

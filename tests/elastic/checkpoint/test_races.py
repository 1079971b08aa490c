"""Saves while a flush is asked for and not read yet: what was to be flushed is, and no save waits."""

import asyncio
import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.agent.snapshots.memory import SLOTS
from elastic.checkpoint.save.keeping import Keeping
from elastic.checkpoint.save.saving import Save, Saver
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import Layout, Piece
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import keeper, manifest, slot
from elastic.proto.errors import SlotError
from tests.agent.snapshots.test_flushes import DEADLINE, Node, node, run, stopped

SIZE = 20 << 20
"""Bytes of the tensor: enough for a flush to be met in its midst."""
ROUND = 3
ATTEMPTS = 50
"""To meet one there."""
LAYOUT = Layout([Piece(name="w", dtype="uint8", shape=(SIZE,), offset=(0,), extent=(SIZE,))], {})
IMAGE = LAYOUT.image(2)


class Rank:
    """One whose snapshots are whole as soon as it has them: a test in the place of its keeper."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        ours, self._end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._keeping = Keeping(ours)
        self._saver = Saver(Folder(Path("/nowhere")), Place(), "job", ROUND, self._keeping, "sync")
        threading.Thread(target=self._give, daemon=True).start()

    def _give(self) -> None:
        need = keeper.receive_from_rank(self._end)
        assert isinstance(need, keeper.Need), need
        answer = keeper.Slots(count=len(self._fds), question=need.question)
        keeper.send(self._end, answer, tuple(self._fds))

    def save(self, step: int) -> int:
        """Returns the descriptor of its slot."""
        state = {"w": torch.full((SIZE,), step % 256, dtype=torch.uint8)}
        self._saver.take(Save(step=step, persist=False, value=None), state)
        assert step in self.holds(), f"the save of step {step} is left out"
        keeper.send(self._end, keeper.Whole(round=ROUND, step=step))
        return next(fd for fd in self._fds if held(fd) == step)

    def holds(self) -> set[int]:
        return {held(fd) for fd in self._fds}

    def close(self) -> None:
        self._saver.close()
        self._keeping.close()
        self._end.close()


def held(fd: int) -> int:
    """The step in a slot; 0: none."""
    with contextlib.suppress(SlotError):
        return slot.read(memoryview(mmap.mmap(fd, 0))).stamp.step
    return 0


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [slot.create(slot.bytes_for(IMAGE.nbytes + slot.PAGE)) for _ in range(SLOTS)]
    yield made
    for fd in made:
        os.close(fd)


def test_saves_between_a_flushs_request_and_its_read(tmp_path: Path, fds: list[int]) -> None:
    async def test() -> None:
        with contextlib.closing(Rank(fds)) as rank:
            async with node(tmp_path) as here:
                here.flushes.write("job", (ROUND, 1), 1, {0: rank.save(1)})
                await here.done()  # there is a flusher now
                flushed = rank.save(2)
                with stopped(here.process()):
                    here.flushes.write("job", (ROUND, 2), 1, {0: flushed})
                    save_on(rank, 2)
                await here.done()
            check(tmp_path, 2)
            rank.save(20)

    run(test())


def test_saves_in_the_midst_of_a_flushs_read(tmp_path: Path, fds: list[int]) -> None:
    async def test() -> None:
        with contextlib.closing(Rank(fds)) as rank:
            async with node(tmp_path) as here:
                for step in range(10, 10 * ATTEMPTS, 10):
                    here.flushes.write("job", (ROUND, step), 1, {0: rank.save(step)})
                    await begun(here, tmp_path / manifest.folder(step))
                    with stopped(here.process()):
                        met = not path_of(tmp_path, step).exists()
                        if met:
                            save_on(rank, step)
                    await here.done()
                    if met:
                        break
                assert met, f"none of {ATTEMPTS} flushes was met in its midst"
            check(tmp_path, step)
            rank.save(10 * ATTEMPTS)

    run(test())


async def begun(here: Node, folder: Path) -> None:
    async with asyncio.timeout(DEADLINE):
        while here.busy and not any(folder.glob(".*")):
            await asyncio.sleep(0)


def save_on(rank: Rank, flushed: int) -> None:
    for step in range(flushed + 1, flushed + 6):
        rank.save(step)
        assert {flushed, step} <= rank.holds(), "what is flushed, and the newest"


def path_of(path: Path, step: int) -> Path:
    return path / manifest.folder(step) / manifest.file(0, 1, ROUND, "job")


def check(path: Path, step: int) -> None:
    data, start = path_of(path, step).read_bytes(), IMAGE.starts["w"]
    assert data[start : start + SIZE] == bytes([step % 256]) * SIZE

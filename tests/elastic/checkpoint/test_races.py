"""Saves while a flush is asked for and not read yet: what was to be flushed is, and no save waits."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.agent.memory import SLOTS
from elastic.checkpoint import copy_cpu, share
from elastic.checkpoint.image import Layout, Piece
from elastic.checkpoint.slots import Slots, reusable
from elastic.proto import manifest, slot
from elastic.proto.slot import Stamp
from tests.agent.test_flushes import DEADLINE, node, run, stopped

SIZE = 20 << 20
"""Bytes of the tensor: enough for a flush to be met in its midst."""
ROUND = 3
LAYOUT = Layout([Piece(name="w", dtype="uint8", shape=(SIZE,), offset=(0,), extent=(SIZE,))], {})
IMAGE = LAYOUT.image(2)


class Rank:
    """One whose snapshots are whole as soon as it has them."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self._slots = Slots([os.dup(fd) for fd in fds])

    def save(self, step: int) -> int:
        """As `Checkpointer.save` does; returns the slot."""

        def stamp(generation: int) -> Stamp:
            return Stamp(
                job="job", step=step, round=ROUND, rank=0, world_size=1, generation=generation
            )

        draft = self._slots.begin(reusable(self._slots.contents(), ROUND, None), stamp, IMAGE)
        assert draft is not None, f"the save of step {step} is blocked"
        with draft:
            tensors = {"w": torch.full((SIZE,), step, dtype=torch.uint8)}
            chunks = copy_cpu.write(IMAGE, tensors, b"{}", draft.image)
            draft.commit(chunks, share.units(LAYOUT, {"w": (0,)}).of(chunks))
        slot.mark_whole(self._slots._views[draft.index], 1)
        return draft.index

    def holds(self) -> set[int]:
        return {c.moment.step for c in self._slots.contents() if c.moment is not None and c.whole}

    def close(self) -> None:
        self._slots.close()


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [slot.create(slot.bytes_for(IMAGE.nbytes)) for _ in range(SLOTS)]
    yield made
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize("moment", ["between the request and the read", "in the midst of the read"])
def test_saves_between_a_flushs_request_and_its_end(
    tmp_path: Path, fds: list[int], moment: str
) -> None:
    async def test() -> None:
        rank = Rank(fds)
        path = tmp_path / manifest.folder(2) / manifest.file(0, 1, ROUND, "job")
        async with node(tmp_path) as here:
            here.flushes.write(str(tmp_path), "job", (ROUND, 1), 1, {0: fds[rank.save(1)]})
            await here.done()  # there is a flusher now
            flushed = fds[rank.save(2)]
            if moment.startswith("between"):
                with stopped(here.process()):
                    here.flushes.write(str(tmp_path), "job", (ROUND, 2), 1, {0: flushed})
                    save_on(rank, path)
            else:
                here.flushes.write(str(tmp_path), "job", (ROUND, 2), 1, {0: flushed})
                async with asyncio.timeout(DEADLINE):
                    while here.busy and not any(path.parent.glob(".*")):
                        await asyncio.sleep(0)
                with stopped(here.process()):
                    save_on(rank, path)
            await here.done()
        data = path.read_bytes()
        start = IMAGE.starts["w"]
        assert data[start : start + SIZE] == bytes([2]) * SIZE
        rank.save(20)
        rank.close()

    def save_on(rank: Rank, path: Path) -> None:
        flushed = set() if path.exists() else {2}  # it may have been faster than we
        for step in range(3, 8):
            rank.save(step)
            assert flushed | {step} <= rank.holds(), "what is flushed, and the newest"

    run(test())

"""The rules of save, of one rank and a keeper process of its own."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from elastic.agent import boot
from elastic.checkpoint import Checkpointer
from elastic.checkpoint.keeper import places
from elastic.checkpoint.memory import host
from elastic.checkpoint.save import turn
from elastic.checkpoint.save.saving import Save
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import keeper, slot
from elastic.proto.errors import CheckpointError
from elastic.proto.moment import Moment

PLENTY = 1 << 30
DEADLINE = 60.0


class Machine:
    """What there is to save to."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint"
        self.memory = folder / "available"
        self.memory.write_text(str(PLENTY))

    @contextmanager
    def checkpoint(self, **options: Any) -> Iterator[Checkpointer]:
        """Its keeper has ended, too, when this has."""
        with Checkpointer(self.path, **options) as made:
            yield made
        places._await_earlier(str(self.path))

    def steps(self) -> list[int]:
        storage = Folder(self.path)
        listing = storage.listing()
        return sorted(one.step for one in manifests.readable(storage, listing)[0])

    def loaded(self) -> tuple[int, list[float]]:
        state: dict[str, Any] = {"w": torch.zeros(3), "n": 0}
        with self.checkpoint() as checkpoint:
            step = checkpoint.load(state)
        return step, state["w"].tolist()


def lost(checkpoint: Checkpointer, step: int) -> str:
    """Why the ranks of all nodes are told that a step is never whole."""
    keeping = checkpoint._keeping
    while not (found := [one for at, one in keeping.lost.items() if at.step == step]):
        assert keeping.wait(keeping.said, DEADLINE), keeping.lost
    return found[0].reason


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    command = boot.command

    def poor(python: str, _: str, *args: str) -> list[str]:
        return command(python, "tests.elastic.checkpoint.poor_keeper", *args)

    monkeypatch.setenv("AVAILABLE", str(made.memory))
    monkeypatch.setattr(boot, "command", poor)
    return made


def state(step: int, size: int = 3) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step)), "n": step}


# --- steps ---------------------------------------------------------------------------------------


def test_steps_only_grow(machine: Machine) -> None:
    with machine.checkpoint() as checkpoint:
        for step in (0, -1):
            with pytest.raises(CheckpointError, match=f"step {step} cannot be: steps only grow$"):
                checkpoint.save(step, state(step))
        checkpoint.save(3, state(3))
        with pytest.raises(
            CheckpointError, match=r"step 2 .*: steps only grow, and step 3 is saved$"
        ):
            checkpoint.save(2, state(2))
        checkpoint.save(4, state(4))
    assert machine.steps() == [4]


def test_a_step_is_a_whole_number_of_any_kind(machine: Machine) -> None:
    with machine.checkpoint() as checkpoint:
        wrong: Any
        for wrong in (1.5, "2", None, torch.tensor(1.5)):
            with pytest.raises(CheckpointError, match="a step is a whole number, not "):
                checkpoint.save(wrong, state(1))
        right: Any
        for right in (np.int64(3), torch.tensor(4)):
            checkpoint.save(right, state(int(right)))
    assert machine.loaded() == (4, [4.0] * 3)


def test_one_that_is_read_only_is_loaded_from_without_slots_and_refuses_to_change_it(
    machine: Machine,
) -> None:
    with machine.checkpoint() as checkpoint:
        checkpoint.save(3, state(3))
        checkpoint.wait()
    with machine.checkpoint(snapshot="shadow", read_only=True) as checkpoint:
        found = state(0)
        assert checkpoint.load(found) == 3
        assert found["w"].tolist() == [3.0] * 3
        assert checkpoint._saver._slots is None
        with pytest.raises(CheckpointError, match="is opened read_only: nothing is changed there"):
            checkpoint.save(4, state(4))
        with pytest.raises(CheckpointError, match="is opened read_only"):
            checkpoint.pin(3)
    assert machine.steps() == [3]


@pytest.mark.parametrize("snapshot", ["sync", "stream"])
def test_the_same_step_again_is_the_same_snapshot_and_may_go_to_storage(
    machine: Machine, snapshot: Any
) -> None:
    with machine.checkpoint(snapshot=snapshot) as checkpoint:
        checkpoint.load(state(0))
        assert checkpoint.wait_ready(DEADLINE) or snapshot == "sync"
        checkpoint.save(3, state(3))
        checkpoint.save(3, state(5))
        checkpoint.wait(DEADLINE)
        assert machine.steps() == []
        checkpoint.save(3, state(5), persist=True)
        checkpoint.wait(DEADLINE)
        assert machine.steps() == [3]
        checkpoint.save(3, state(5), persist=True)
        checkpoint.wait(DEADLINE)
    assert machine.loaded() == (3, [3.0] * 3)


def test_a_snapshot_that_is_gone_is_not_made_up_for_by_a_later_state(machine: Machine) -> None:
    """Other ranks have that step as it was: they would make a step that never was."""
    with machine.checkpoint() as checkpoint:
        checkpoint.save(3, state(3))
        keeping = checkpoint._keeping
        while (
            keeping.whole is None or keeping.whole.step < 3
        ):  # or nobody keeps it when others are made
            assert keeping.wait(keeping.said, DEADLINE)
        checkpoint.save(3, state(5, size=1 << 20), persist=True)  # it gets other slots
        with pytest.raises(CheckpointError, match="step 3 is not on storage: its snapshot is gone"):
            checkpoint.wait(DEADLINE)
        assert lost(checkpoint, 3).startswith("rank 0: its snapshot is gone")
    assert machine.loaded() == (3, [3.0] * 3), "by the end of the job"


def test_a_keeper_that_is_gone_before_what_is_due_is_on_storage_is_missed_at_the_end(
    machine: Machine,
) -> None:
    """Nobody else would say it; what it had in memory alone is nobody's loss."""
    machine.path.write_text("in the way")
    with Checkpointer(machine.path) as checkpoint:
        checkpoint.save(1, state(1), persist=True)
        found = (
            process
            for process in psutil.process_iter(["cmdline", "create_time"])
            if f"elastic-keeper {machine.path}" in " ".join(process.info["cmdline"] or ())
        )
        # The oldest: one that becomes its flusher has its title for a moment.
        keeper = min(found, key=lambda process: float(process.info["create_time"]))
        keeper.kill()
        psutil.wait_procs([keeper], DEADLINE)
        with pytest.raises(CheckpointError, match="is gone"):
            checkpoint.close()


# --- memory --------------------------------------------------------------------------------------


def test_without_memory_snapshots_are_left_out_and_what_is_due_goes_to_storage(
    machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    machine.memory.write_text("4096")
    with machine.checkpoint(persist_every=4) as checkpoint:
        for step in range(1, 7):
            checkpoint.save(step, state(step))
        assert not checkpoint.ready
        checkpoint.wait(DEADLINE)
        assert machine.steps() == [4]
        said = capfd.readouterr().err
        assert said.count("of memory can be had for snapshots, 4 slots of") == 1, said
        checkpoint.save(7, state(7), persist=True)
        checkpoint.wait(DEADLINE)
        assert machine.steps() == [4, 7]
    assert machine.loaded() == (7, [7.0] * 3)


def test_a_step_that_ranks_leave_in_is_written_without_memory_though_it_is_not_due(
    machine: Machine,
) -> None:
    machine.memory.write_text("4096")
    machine.path.write_text("in the way")
    with machine.checkpoint() as checkpoint:
        checkpoint.save(1, state(1))
        last = Save(step=1, persist=False, value=None)
        assert "step 1 is not on storage: Not a dir" in checkpoint._saver.keep(last, state(1))
        machine.path.unlink()
        assert not checkpoint._saver.keep(last, state(1))
        checkpoint.wait(DEADLINE)
        assert machine.steps() == [1]
        machine.memory.write_text(str(PLENTY))
        checkpoint.save(2, state(2))
        checkpoint.save(3, state(3))
        assert not checkpoint._saver.keep(Save(step=3, persist=False, value=None), state(3))
        assert machine.steps() == [1], "it is in memory"


def test_memory_is_asked_for_again(machine: Machine) -> None:
    machine.memory.write_text("4096")
    with machine.checkpoint() as checkpoint:
        checkpoint.save(1, state(1))
        machine.memory.write_text(str(PLENTY))
        checkpoint.save(2, state(2))
        assert not checkpoint.ready
        checkpoint.save(3, state(3))
        assert checkpoint.ready
        machine.memory.write_text(str(1 << 20))
        checkpoint.save(4, state(4, 1 << 20))
        assert not checkpoint.ready, "it has grown"
        checkpoint.save(5, state(5))
        assert checkpoint.ready, "it is small again"
    assert machine.steps() == [5]


def test_a_storage_that_fails_without_memory_is_told_to_who_waits(machine: Machine) -> None:
    machine.memory.write_text("4096")
    machine.path.write_text("in the way")
    with machine.checkpoint() as checkpoint:
        checkpoint.save(1, state(1), persist=True)
        with pytest.raises(CheckpointError, match="step 1 is not on storage: Not a directory"):
            checkpoint.wait(DEADLINE)
        assert lost(checkpoint, 1) == "rank 0: Not a directory"
        machine.path.unlink()
        checkpoint.save(1, state(1), persist=True)
        checkpoint.wait(DEADLINE)
        assert machine.steps() == [1]
        checkpoint.save(2, state(2), persist=True)
        checkpoint.wait(DEADLINE)
        assert machine.steps() == [1, 2]


def test_who_has_written_what_it_failed_to_write_hears_of_others_that_fail(
    machine: Machine,
) -> None:
    machine.memory.write_text("4096")
    machine.path.write_text("in the way")
    with machine.checkpoint() as checkpoint:
        checkpoint.save(1, state(1), persist=True)
        assert lost(checkpoint, 1) == "rank 0: Not a directory"
        saver, keeping, at = checkpoint._saver, checkpoint._keeping, Moment(1, 1)
        assert saver.failed == {at}
        saver.due, saver.unwritten = at, ""  # as when it is saved again, and written
        with pytest.raises(CheckpointError, match="step 1 is not on storage yet"):
            checkpoint.wait(0.1)
        keeping.lost[at] = keeper.Lost(round=1, step=1, reason="rank 1: No space left on device")
        with pytest.raises(CheckpointError, match="cannot be kept: rank 1: No space"):
            checkpoint.wait(DEADLINE)
        saver.due = None


@pytest.mark.parametrize("snapshot", ["sync", "stream"])
def test_pages_that_cannot_be_had_end_no_training(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    snapshot: Any,
) -> None:
    """The kernel says ENOMEM where the reckoning had said that there is enough."""
    populate: Callable[..., int] = host.populate
    short = True

    def populated(data: memoryview, *, write: bool, huge: bool = False) -> int:
        return errno.ENOMEM if short and write else populate(data, write=write, huge=huge)

    monkeypatch.setattr(host, "populate", populated)
    with machine.checkpoint(snapshot=snapshot) as checkpoint:
        checkpoint.save(1, state(1), persist=True)
        checkpoint.save(2, state(2))
        checkpoint.wait(DEADLINE)
        assert not checkpoint.ready
        assert machine.steps() == [1], "straight"
        short = False
        for step in (3, 4, 5):
            checkpoint.save(step, state(step))
        assert checkpoint.wait_ready(DEADLINE)
        checkpoint.save(6, state(6))
    assert caplog.text.count("no snapshots until there is memory again") == 1
    assert machine.loaded() == (6, [6.0] * 3)


# --- readers -------------------------------------------------------------------------------------


def test_readers_that_hang_cost_one_wait(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a storage that does not answer while it has a slot; the next save finds one again."""
    monkeypatch.setattr(turn, "WHOLE_TIMEOUT", 0.1)
    with machine.checkpoint() as checkpoint:
        checkpoint.save(1, state(1))
        slots = checkpoint._saver._slots
        assert slots is not None
        claims = [slot.claim(fd, exclusive=False) for fd in slots._fds]
        for step in (2, 3, 4):
            checkpoint.save(step, state(step))
        assert caplog.text.count("no snapshots until a slot is free of readers") == 1
        monkeypatch.setattr(turn, "WHOLE_TIMEOUT", 10 * DEADLINE)
        checkpoint.save(5, state(5))  # which would take as long
        checkpoint.save(6, state(6), persist=True)
        with pytest.raises(CheckpointError, match="step 6 is not on storage: no snapshots until"):
            checkpoint.wait(DEADLINE)
        assert lost(checkpoint, 6) == "rank 0: no snapshots until a slot is free of readers"
        for claim in claims:
            assert claim is not None
            os.close(claim)
        checkpoint.save(7, state(7), persist=True)
        checkpoint.wait(DEADLINE)
    assert machine.steps() == [7]
    assert caplog.text.count("free of readers") == 2


# --- what goes wrong behind ----------------------------------------------------------------------


def test_a_snapshot_that_is_void_is_not_taken_for_one_on_storage(machine: Machine) -> None:
    model = torch.nn.Linear(3, 3)
    with machine.checkpoint(snapshot="stream") as checkpoint:
        checkpoint.save(1, {"model": model})
        checkpoint.wait(DEADLINE)
        slots = checkpoint._saver._slots
        assert slots is not None
        claims = [slot.claim(fd, exclusive=False) for fd in slots._fds]
        checkpoint.save(2, {"model": model}, persist=True)  # its copy waits for a slot
        with torch.no_grad():
            model.weight.add_(1)
        for claim in claims:
            assert claim is not None
            os.close(claim)
        with pytest.raises(CheckpointError, match=r"step 2 .* model[.]weight changed"):
            checkpoint.wait(DEADLINE)
        assert lost(checkpoint, 2) == "rank 0: model.weight changed while it was copied"
        checkpoint.save(3, {"model": model}, persist=True)
        checkpoint.wait(DEADLINE)
    assert machine.steps() == [3]


def test_no_copy_waits_for_memory_while_there_are_two_slots(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third one's never comes; what is prepared is free once what was just saved is known as whole."""
    populate: Callable[..., int] = host.populate
    calls = 0
    over = Event()

    def populated(data: memoryview, *, write: bool, huge: bool = False) -> int:
        nonlocal calls
        calls += write
        if write and calls > 2:
            assert over.wait(10 * DEADLINE)
        return populate(data, write=write, huge=huge)

    monkeypatch.setattr(host, "populate", populated)
    with machine.checkpoint(snapshot="stream") as checkpoint:
        try:
            for step in range(1, 12):
                checkpoint.save(step, state(step), persist=step == 1)
            assert checkpoint._saver.finish(DEADLINE)
            assert not checkpoint.wait_ready(0, every=True)
        finally:
            over.set()
    assert machine.loaded() == (11, [11.0] * 3)


def test_a_void_snapshot_in_the_place_of_one_that_was_due_is_told_to_who_waits(
    machine: Machine,
) -> None:
    """Storage fails meanwhile, so every slot is due but for the newest."""
    model = torch.nn.Linear(3, 3)
    machine.path.write_text("in the way")
    with machine.checkpoint(snapshot="stream") as checkpoint:
        for step in range(1, 5):
            checkpoint.save(step, {"model": model}, persist=step < 4)
            checkpoint._saver.finish()
        slots = checkpoint._saver._slots
        assert slots is not None
        assert slots.count == 4
        claims = [slot.claim(fd, exclusive=False) for fd in slots._fds]
        checkpoint.save(5, {"model": model})  # its copy waits for a slot
        with torch.no_grad():
            model.weight.add_(1)
        for claim in claims:
            assert claim is not None
            os.close(claim)
        with pytest.raises(CheckpointError, match=r"step 5 .* model[.]weight changed"):
            checkpoint.wait(DEADLINE)
        assert lost(checkpoint, 5) == "rank 0: model.weight changed while it was copied"
        machine.path.unlink()
        checkpoint.save(6, {"model": model}, persist=True)
        checkpoint.wait(DEADLINE)
    assert machine.steps()[-1] == 6


def test_pages_that_a_copy_behind_cannot_have_are_told_to_who_waits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first slot has its memory; of the others there is none once they are written."""
    populate: Callable[..., int] = host.populate
    first, short = Event(), Event()

    def populated(data: memoryview, *, write: bool, huge: bool = False) -> int:
        if not write or not first.is_set():
            first.set()
            return populate(data, write=write, huge=huge)
        short.wait(DEADLINE)
        return errno.ENOMEM

    monkeypatch.setattr(host, "populate", populated)
    with machine.checkpoint(snapshot="stream") as checkpoint:
        checkpoint.save(1, state(1), persist=True)
        checkpoint.wait(DEADLINE)
        checkpoint.save(2, state(2), persist=True)  # its copy waits for another slot
        short.set()
        with pytest.raises(CheckpointError, match="step 2 is not on storage: no memory for a slot"):
            checkpoint.wait(DEADLINE)
        assert lost(checkpoint, 2).startswith("rank 0: no memory for a slot")
        checkpoint.save(3, state(3), persist=True)
        checkpoint.wait(DEADLINE)
    assert machine.steps() == [1, 3], "straight"

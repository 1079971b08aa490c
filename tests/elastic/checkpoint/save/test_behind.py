"""Snapshots behind training's back: what is in them is what was there when they were taken, or they are
none; here with tensors in host memory, which take the same way but for the stream."""

import logging
import os
import sys
from collections.abc import Iterator
from concurrent.futures.thread import BrokenThreadPool
from functools import partial
from threading import Event, Thread, local
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastic.checkpoint.memory import copy_cpu, lanes
from elastic.checkpoint.save.behind import Behind, Copy, steady
from elastic.checkpoint.save.slots import PART, Slots
from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.state.image import Image, lay_out
from elastic.proto import slot
from elastic.proto.errors import CheckpointError
from tests.proto.chunks import damaged


@pytest.fixture
def behind() -> Iterator[Behind]:
    made = Behind(lanes.Host())
    yield made
    made.close()


class Run:
    """A model, its optimizer after a step, and snapshots of both."""

    def __init__(self, behind: Behind) -> None:
        self.behind = behind
        self.linear = nn.Linear(8, 8)
        self.model: nn.Module = nn.Sequential(self.linear, nn.BatchNorm1d(8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "n": 5}
        self.train()
        self.images: list[bytearray] = []

    def inputs(self) -> torch.Tensor:
        return torch.randn(4, 8, device=self.linear.weight.device)

    def train(self) -> None:
        torch.autograd.backward(self.model(self.inputs()).square().sum())
        self.optimizer.step()

    def take(self) -> tuple[Image, Copy]:
        found = collect(self.state, Place())
        image = lay_out(
            [part.piece for part in found.parts.values()], found.ties, len(found.values)
        )
        tensors = {name: part.tensor for name, part in found.parts.items()}
        copy = self.behind.take(image, found.values.encode(), tensors, partial(steady, self.state))
        return image, copy

    def run(self, image: Image, copy: Copy) -> None:
        out = bytearray(image.nbytes)
        chunks = copy.run(memoryview(out), 2)
        assert damaged(memoryview(out), chunks) == []
        self.images.append(out)

    def values(self) -> dict[str, list[Any]]:
        parts = collect(self.state, Place()).parts
        return {name: part.tensor.tolist() for name, part in parts.items()}

    def check(self, image: Image, out: bytearray, expected: dict[str, list[Any]]) -> None:
        for name, piece in image.pieces.items():
            start = image.starts[name]
            tensor = copy_cpu.tensor_of(piece, memoryview(out)[start : start + piece.nbytes])
            assert tensor.tolist() == expected[name], name


def held(training: Thread) -> bool:
    """It waits for a copy."""
    frame, waits = sys._current_frames().get(training.ident or 0), False
    while frame is not None and frame.f_code is not Copy.hold.__code__:
        waits |= frame.f_code is Event.wait.__code__
        frame = frame.f_back
    return frame is not None and waits


def step_waits(run: Run, copy: Copy, image: Image, late: Event) -> bool:
    """Train one step while the copy has not begun; whether the step waits for it."""

    def work() -> None:
        late.wait()
        run.run(image, copy)

    run.behind.submit(copy, work)
    training = Thread(target=run.train)
    training.start()
    while training.is_alive() and not held(training):
        os.sched_yield()
    waits = training.is_alive()
    late.set()
    training.join()
    assert run.behind.finish()
    return waits


@pytest.mark.parametrize("path", ["shadow", "stream"])
def test_a_snapshot_is_of_when_it_was_taken(behind: Behind, path: Any) -> None:
    behind.path = path
    run = Run(behind)
    for _ in range(3):
        before = run.values()
        image, copy = run.take()
        assert step_waits(run, copy, image, Event()) == (path == "stream")
        run.check(image, run.images[-1], before)
        assert run.values() != before


@pytest.mark.gpu
def test_what_is_in_host_memory_has_no_shadow_on_the_device() -> None:
    """Moments of an offloaded optimizer, say: its step waits until they are copied."""
    behind = Behind(lanes.Cuda(torch.device("cuda", 0)))
    behind.path = "shadow"
    run = Run(behind)
    run.model.cuda()
    offloaded = nn.Parameter(torch.zeros(1 << 20))
    run.state["offloaded"] = nn.ParameterList([offloaded])
    run.optimizer = torch.optim.AdamW([*run.model.parameters(), offloaded], lr=0.1)
    run.state["optimizer"] = run.optimizer
    for _ in range(3):
        offloaded.grad = torch.randn_like(offloaded)
        run.train()
        before, free = run.values(), torch.cuda.memory_allocated()
        image, copy = run.take()
        assert torch.cuda.memory_allocated() - free < 1 << 20
        assert step_waits(run, copy, image, Event())
        run.check(image, run.images[-1], before)
    behind.close()


def test_a_change_by_something_else_makes_a_streamed_snapshot_void(
    behind: Behind, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(behind)
    weight = run.linear.weight
    image, copy = run.take()
    with torch.no_grad():
        weight.clamp_(-0.01, 0.01)
    with caplog.at_level(logging.WARNING):
        behind.submit(copy, lambda: run.run(image, copy))
        assert behind.finish()
    assert run.images == []
    (line,) = caplog.messages
    assert line.startswith("a snapshot is left out: model.0.weight changed while it was copied")
    before = run.values()
    image, copy = run.take()
    with torch.no_grad():
        weight.clamp_(-0.001, 0.001)
    behind.submit(copy, lambda: run.run(image, copy))
    assert behind.finish()
    run.check(image, run.images[-1], before)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield DeviceMesh("cpu", torch.arange(2))
    dist.destroy_process_group()


def test_a_dtensor_that_something_else_than_an_optimizer_changes_is_kept_at_once(
    behind: Behind, mesh: DeviceMesh
) -> None:
    """An average of weights, say: torch counts no change of its piece."""
    behind.path = "stream"
    run = Run(behind)
    ones = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None)
    average = nn.ParameterList([nn.Parameter(ones)])
    run.state["average"] = average
    image, copy = run.take()
    with torch.no_grad():
        torch._foreach_lerp_([*average], [torch.zeros_like(ones)], 0.25)
    run.run(image, copy)
    at = image.starts["average.0"]
    kept = torch.frombuffer(run.images[-1][at : at + 32], dtype=torch.float32)
    assert kept.tolist() == [1.0] * 8


def test_what_no_optimizer_changes_is_kept_at_once(behind: Behind) -> None:
    run = Run(behind)
    before = run.values()
    image, copy = run.take()
    run.model(run.inputs())  # the running mean of a batch norm
    behind.submit(copy, lambda: run.run(image, copy))
    assert behind.finish()
    run.check(image, run.images[-1], before)
    assert run.values() != before


@pytest.mark.parametrize("path", ["shadow", "stream"])
def test_every_thread_of_ours_enters_the_lane_before_it_does_anything_there(path: Any) -> None:
    """Else a rank of device 1 has a context on device 0 (tests/e2e/test_gpus.py)."""
    lane = Entered()
    behind = Behind(lane)
    behind.path = path
    run = Run(behind)
    slots = Slots([slot.create(PART + 2 * slot.PAGE) for _ in range(2)], 3, lane)
    behind.prepare(slots)
    image, copy = run.take()
    behind.submit(copy, lambda: run.run(image, copy))
    behind.wait_ready(None, every=True)
    assert slots.prepared == 2
    assert behind.finish()
    behind.leave(slots)
    slots.close()
    behind.close()
    assert {"follow", "copy", "mark", "register"} <= {what for what, _ in lane.did}
    assert [what for what, entered in lane.did if not entered] == []


class Entered(lanes.Host):
    """Notes what was done in threads other than training's, and whether they had entered."""

    def __init__(self) -> None:
        self.did: list[tuple[str, bool]] = []
        self._here = local()
        self._here.entered = True

    def enter(self) -> None:
        self._here.entered = True

    def _note(self, what: str) -> None:
        self.did.append((what, hasattr(self._here, "entered")))

    def follow(self, mark: None) -> None:
        self._note("follow")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._note("copy")
        super().copy(target, source)

    def mark(self) -> None:
        self._note("mark")

    def finish(self, mark: None) -> None:
        self._note("finish")

    def register(self, data: memoryview, rest: lanes.Rest | None = None) -> None:
        self._note("register")
        super().register(data, rest)


@pytest.mark.parametrize("path", ["shadow", "stream"])
def test_what_goes_wrong_behind_is_raised_once_and_stops_nobody(behind: Behind, path: Any) -> None:
    behind.path = path
    run = Run(behind)

    def fail() -> None:
        raise CheckpointError("no slot")

    _, copy = run.take()
    behind.submit(copy, fail)
    with pytest.raises(CheckpointError, match="no slot"):
        behind.finish()
    behind.check()
    run.train()  # does not wait for what failed
    before = run.values()
    image, copy = run.take()  # nor does this
    behind.submit(copy, lambda: run.run(image, copy))
    assert behind.finish()
    run.check(image, run.images[-1], before)


class Broken(lanes.Host):
    def enter(self) -> None:
        raise RuntimeError("no context")


def test_a_thread_that_cannot_begin_stops_nobody() -> None:
    behind = Behind(Broken())
    run = Run(behind)
    image, copy = run.take()
    behind.submit(copy, lambda: run.run(image, copy))
    run.train()
    with pytest.raises(BrokenThreadPool):
        behind.finish()
    behind.close()


def test_every_dtype_and_stride_is_kept(behind: Behind) -> None:
    run = Run(behind)
    run.state = {
        "t": torch.arange(12.0).view(3, 4).t(),
        "conj": torch.complex(torch.ones(3), torch.ones(3)).conj(),
        "int8": torch.arange(5, dtype=torch.int8),
        "bf16": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "more": {str(n): torch.full((n,), float(n)) for n in range(40)},
    }
    paths: tuple[Any, ...] = ("shadow", "stream")
    for path in paths:
        behind.path = path
        image, copy = run.take()
        behind.submit(copy, lambda image=image, copy=copy: run.run(image, copy))  # type: ignore[misc]
        assert behind.finish()
        run.check(image, run.images[-1], run.values())

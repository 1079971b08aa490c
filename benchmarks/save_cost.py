"""What a save costs beside the copy: a state taken apart and laid out, in the time of the thread that trains.

Beside it the same state planned anew, as for a rank's first save. No byte is copied.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.table import Row, Sample
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.planner import Planner

TENSORS = 1000
PARAMETERS = 300
SIZE = 8
"""Rows and columns of each: what is measured does not depend on them."""


def rows(n: int) -> list[Row]:
    """`n` saves of each state, after one that is not counted."""
    with _group():
        return [_row(what, state, n) for what, state in _states()]


def _row(what: str, state: dict[str, Any], n: int) -> Row:
    kept = Planner(Place())
    ours, anew = (Sample(launcher=name, unit="us") for name in ("plan kept", "planned anew"))
    ways: list[tuple[Sample, Callable[[], Planner]]] = [
        (anew, lambda: Planner(Place())),
        (ours, lambda: kept),
    ]
    kept.share(state)
    for _ in range(n):
        for sample, planner in ways:
            sample.add(_seconds(planner(), state) * 1e6)
    return Row(measure=f"{what}: to plan a save", ours=ours, peers=[anew])


def _states() -> Iterator[tuple[str, dict[str, Any]]]:
    tensors = {f"layer.{number}.weight": torch.ones(SIZE, SIZE) for number in range(TENSORS)}
    yield f"{TENSORS} plain tensors", {"tensors": tensors}
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE) for _ in range(PARAMETERS // 2)))
    mesh = init_device_mesh("cpu", (1,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, SIZE)).sum().backward()
    optimizer.step()
    yield f"{PARAMETERS} FSDP2 parameters", {"model": model}
    yield f"{PARAMETERS} FSDP2 parameters, AdamW", {"model": model, "optimizer": optimizer}


@contextmanager
def _group() -> Iterator[None]:
    """Of this process alone."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _seconds(planner: Planner, state: dict[str, Any]) -> float:
    """Of this thread's own time, whatever else runs."""
    began = time.thread_time()
    planner.share(state)
    return time.thread_time() - began

"""A model, laid out over the ranks: everything in the one order in which it works.

Meshes, then stages, then tensor parallelism (as the layers are made), then FSDP2, then memory and the
first weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from elastic.proto.errors import UsageError
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.gradients import Gradients
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.pipeline import Pipeline, Schedule, cut
from elastic.trainer.parallel.sharding import shard
from elastic.trainer.parallel.tensor import TensorParallel
from elastic.trainer.parallel.whole import Whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a model is shared out. Data parallelism takes the ranks that are left."""

    tp: int = 1
    """Ranks that share each layer."""
    sequence: bool = False
    """Whether they share the residual stream, too, by positions."""
    pp: int = 1
    """Ranks that have some of the layers each."""
    virtual: int = 1
    """Stages of each of them; more than one only for schedules that interleave."""
    schedule: Schedule = "1f1b"
    """In what order stages run leaves."""
    zero: int = 1
    """ZeRO's stage, 0 to 3; with pipeline stages 0 or 1."""
    compute: torch.dtype = torch.bfloat16
    """What is computed in; parameters are kept in fp32."""
    exact: bool = True
    """Whether gradients are the same bits in any number of replicas."""

    def __post_init__(self) -> None:
        if self.virtual > 1 and self.schedule not in ("interleaved", "zero-bubble"):
            raise UsageError(f"{self.schedule} has one stage a rank: take interleaved, or one")
        if self.sequence and self.tp == 1:
            raise UsageError("sequence parallelism needs tensor-model-parallel-size above 1")
        if self.pp > 1 and self.zero > 1:
            raise UsageError(f"ZeRO {self.zero} would reduce every leaf of a pipeline: take 0 or 1")
        if self.exact and self.zero > 1:
            raise UsageError(f"ZeRO {self.zero} adds leaves up in fp32, not exactly: take 0 or 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """This rank's part of it."""

    grid: Grid
    place: Place
    parts: Sequence[GPT]
    """Its stages, or the whole model."""
    runner: Pipeline | Whole
    gradients: Gradients


def lay_out(
    config: GPTConfig,
    layout: Layout,
    *,
    leaf_size: int,
    leaves: int,
    seed: int,
    std: float,
    device: torch.device,
) -> Laid:
    """Make this rank's part of the model, with its first weights. All ranks of the world call it.

    leaf_size: samples of a leaf; leaves: the most that a batch of the run has. Raises `UsageError`
    where the model, the layout and the world do not fit.
    """  # fmt: skip
    grid = Grid.of(dist.get_world_size(), tp=layout.tp, pp=layout.pp)
    config.check_split(layout.tp)
    if layout.sequence and config.seq_length % layout.tp:
        raise UsageError(
            f"--sequence-parallel: {layout.tp} does not divide seq_length {config.seq_length}"
        )
    stages = cut(config.num_layers, layout.pp * layout.virtual)
    place = grid.place(dist.get_rank())
    mesh = init_device_mesh(
        device.type, (grid.dp, grid.pp, grid.tp), mesh_dim_names=("dp", "pp", "tp")
    )
    tp = TensorParallel(mesh=mesh["tp"] if layout.tp > 1 else None, sequence=layout.sequence)
    tied = _tied(grid, place) if config.tied and layout.pp > 1 else None
    parts = []
    for number in range(layout.virtual):
        with torch.device("meta"):
            part = GPT(config, tp, stages[number * layout.pp + place.pp])
        reduce = torch.float64 if layout.exact else torch.float32
        shard(part, mesh["dp"], stage=layout.zero, compute=layout.compute, reduce=reduce)
        part.to_empty(device=device)
        initialize(part, config, seed, std)
        parts.append(part)
    with torch.device("meta"):
        names = [name for name, _ in GPT(config).named_parameters()]
    sums = leaves * layout.tp * (2 if config.tied else 1)
    gradients = Gradients(parts, names, leaves=sums if layout.exact else None, tied=tied)
    length = config.seq_length // (layout.tp if layout.sequence else 1)
    runner: Pipeline | Whole = Whole(parts[0], stage=layout.zero)
    if layout.pp > 1:
        runner = Pipeline(
            parts, mesh["pp"], schedule=layout.schedule,
            hidden=(leaf_size, length, config.hidden_size), dtype=layout.compute,
        )  # fmt: skip
    return Laid(
        grid=grid, place=place, parts=parts, runner=runner,
        gradients=gradients,
    )  # fmt: skip


def _tied(grid: Grid, place: Place) -> dist.ProcessGroup | None:
    """The first and the last stage of this rank's replica, if it is one of them."""
    mine = None
    for dp in range(grid.dp):
        for tp in range(grid.tp):
            ends = [grid.rank(Place(dp, pp, tp)) for pp in (0, grid.pp - 1)]
            group = dist.new_group(ends)
            if place in (Place(dp, 0, tp), Place(dp, grid.pp - 1, tp)):
                mine = group
    return mine

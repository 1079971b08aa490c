"""A model, laid out over the ranks: everything in the one order in which it works.

Kernels, meshes, then stages, then tensor parallelism (as the layers are made), recompute, compile, then
FSDP2, then memory and the first weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic.proto.errors import UsageError
from elastic.trainer.model import attention
from elastic.trainer.model.attention import Kernel
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.dropout import Keys
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.model.tensor_parallel import TensorParallel
from elastic.trainer.parallel.gradients import WORDS, Gradients
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.kernels import compile_each, deterministic
from elastic.trainer.parallel.pipeline import Pipeline, Schedule, cut
from elastic.trainer.parallel.program import ForwardStep, Program
from elastic.trainer.parallel.sharding import BLOCKS, blocks, shard
from elastic.trainer.parallel.whole import Whole
from elastic.trainer.watch.phases import Clock, NoClock

Offload = Literal["none", "optimizer", "all"]


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
    recompute: Recompute = field(default_factory=Recompute)
    """What backward computes again instead of keeping it."""
    compile: bool = False
    """Whether each block is compiled."""
    attention: Kernel | None = None
    """What computes attention; None: the first fused kernel that takes it and, if `exact`, ends with the same bits
    again."""
    offload: Offload = "none"
    """What is in host memory: nothing, the optimizer's moments (`run/host_adamw.py`), or with them
    parameters and gradients, which the optimizer then steps on the CPU."""

    def __post_init__(self) -> None:
        if self.virtual > 1 and self.schedule not in ("interleaved", "zero-bubble"):
            raise UsageError(f"{self.schedule} has one stage a rank: take interleaved, or one")
        if self.sequence and self.tp == 1:
            raise UsageError("sequence parallelism needs tensor-model-parallel-size above 1")
        if self.pp > 1 and self.zero > 1:
            raise UsageError(f"ZeRO {self.zero} would reduce every leaf of a pipeline: take 0 or 1")
        if self.attention == "cudnn" and self.exact:
            raise UsageError(
                "--attention-backend fused (cuDNN's) may end with other bits each time, which --reduction "
                "exact forbids: take --attention-backend flash"
            )
        if self.schedule == "zero-bubble" and self.compile:
            raise UsageError(
                "zero-bubble would run compiled blocks' backward twice: take interleaved"
            )
        if self.schedule == "zero-bubble" and self.recompute.granularity == "full":
            raise UsageError(
                "zero-bubble would compute each layer again for each of its weights: take "
                "--recompute-granularity selective, or interleaved"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """This rank's part of it."""

    grid: Grid
    place: Place
    mesh: DeviceMesh
    """The groups of ranks: `dp`, and `pp` and `tp` where these are more than one."""
    model: nn.Module
    """All that it has of the model, under the names of the whole: for checkpoints and optimizers."""
    programs: Sequence[Program]
    """Its stages, each by itself."""
    runner: Pipeline | Whole
    gradients: Gradients
    device: torch.device
    """Where it computes."""
    attention: Kernel
    """What computes it."""
    dropout: Keys | None
    """What its masks are drawn by; None: nothing is dropped."""
    clock: Clock
    """Of the phases of a step."""
    _alone: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Of the ranks along `axis` (dp, pp or tp). That of this rank alone is made once it is asked for, and no other
        rank need ask."""
        if axis in (self.mesh.mesh_dim_names or ()):
            return self.mesh[axis].get_group()
        if axis not in self._alone:
            self._alone[axis] = _alone()
        return self._alone[axis]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Which part of a model is to be made."""

    tp: TensorParallel
    """Who shares its layers."""
    layers: range
    """Its blocks."""
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the head."""


def lay_out(
    config: GPTConfig,
    layout: Layout,
    *,
    make: Callable[[Part], nn.Module],
    forward_step: ForwardStep,
    leaf_size: int,
    leaves: int,
    seed: int,
    device: torch.device,
    clock: Clock | None = None,
) -> Laid:
    """Make this rank's part of the model, which `tp` ranks can share out (`GPTConfig.check_split`), with any weights. All
    ranks of the world call it.

    make: a part of the model, of parameters on the meta device; forward_step: what a leaf does with it;
    leaf_size: samples of a leaf; leaves: the most that a batch of the run has; seed: of dropout; clock: of
    a step's phases. Raises `UsageError` where the model, the layout and the world do not fit.
    """
    grid, clock = Grid.of(dist.get_world_size(), tp=layout.tp, pp=layout.pp), clock or NoClock()
    if layout.exact:
        deterministic(device)
    kernel = attention.use(
        layout.attention, config, leaf_size=leaf_size, tp=layout.tp, dtype=layout.compute,
        device=device, exact=layout.exact, compiled=layout.compile,
    )  # fmt: skip
    count = layout.pp * layout.virtual
    stages = cut(config.num_layers, count)
    place = grid.place(dist.get_rank())
    mesh = _mesh(grid, device)
    tp = TensorParallel(mesh=mesh["tp"] if layout.tp > 1 else None, sequence=layout.sequence)
    whole = Part(tp=TensorParallel(), layers=range(config.num_layers), first=True, last=True)
    with torch.device("meta"):
        named = dict(make(whole).named_parameters())
    programs = []
    for number in range(place.pp, count, layout.pp):
        part = Part(tp=tp, layers=stages[number], first=number == 0, last=number == count - 1)
        with torch.device("meta"):
            program = Program(make(part), forward_step, last=part.last, clock=clock)
        for name, parameter in program.model.named_parameters():
            if name not in named:  # a copy of another stage's embedding, as the head
                parameter.requires_grad_(named[WORDS].requires_grad)
        _prepare(program, layout, mesh["dp"], device)
        programs.append(program)
    sums = leaves * layout.tp * (2 if config.tied else 1)
    gradients = Gradients(
        programs,
        list(named),
        leaves=sums if layout.exact else None,
        tied=_tied(grid, place, mesh["pp"]) if config.tied and layout.pp > 1 else None,
        every_leaf=layout.zero > 1,
        compiled=layout.compile,
        device=device,
    )
    return Laid(
        grid=grid, place=place, mesh=mesh,
        model=_merged([program.model for program in programs]), programs=programs,
        runner=_runner(programs, config, layout, mesh, leaf_size=leaf_size),
        gradients=gradients, device=device, attention=kernel,
        dropout=Keys(seed=seed, layers=config.num_layers, device=device) if config.drops else None,
        clock=clock,
    )  # fmt: skip


def _alone() -> dist.ProcessGroup:
    """A group of this rank. While the world is bound to a device NCCL would split its communicator for it, in which all
    ranks have a part."""
    world = dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    finally:
        world.bound_device_id = bound
    assert isinstance(group, dist.ProcessGroup)
    return group


def _mesh(grid: Grid, device: torch.device) -> DeviceMesh:
    """Without groups of one rank but FSDP's, since NCCL takes its time for these, too; that of the whole world is
    there already."""
    every = {"dp": grid.dp, "pp": grid.pp, "tp": grid.tp}
    sizes = {name: size for name, size in every.items() if name == "dp" or size > 1}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _prepare(program: Program, layout: Layout, mesh: DeviceMesh, device: torch.device) -> None:
    """Recompute, compile, FSDP2 and memory, in this order. mesh: of data parallelism. UsageError for a buffer."""
    for name, _ in program.model.named_buffers():
        raise UsageError(
            f"the model's buffer {name} would be lost, since models are made without memory: compute it in "
            "forward, or have a parameter that is not trained"
        )
    if layout.recompute.granularity != "none":
        program.model.recompute(layout.recompute)  # type: ignore[operator]
    if layout.compile:
        compile_each(program, blocks(program))
    on_host = layout.offload == "all"
    shard(
        program, mesh, stage=layout.zero, compute=layout.compute,
        reduce=torch.float64 if layout.exact else torch.float32, on_host=on_host,
    )  # fmt: skip
    program.to_empty(device="cpu" if on_host else device)


def _runner(
    programs: Sequence[Program],
    config: GPTConfig,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    leaf_size: int,
) -> Pipeline | Whole:
    tokens = leaf_size * config.seq_length
    if layout.pp == 1:
        return Whole(programs[0], stage=layout.zero, tokens=tokens)
    length = config.seq_length // (layout.tp if layout.sequence else 1)
    return Pipeline(
        programs, mesh["pp"], schedule=layout.schedule, hidden=(leaf_size, length, config.hidden_size),
        dtype=layout.compute, tokens=tokens,
    )  # fmt: skip


def _merged(parts: Sequence[nn.Module]) -> nn.Module:
    if len(parts) == 1:
        return parts[0]
    whole, blocks = nn.Module(), nn.ModuleDict()
    for part in parts:
        for name, child in part.named_children():
            if isinstance(child, nn.ModuleDict):
                blocks.update(dict(child.items()))
            else:
                whole.add_module(name, child)
    whole.add_module(BLOCKS, blocks)
    return whole


def _tied(grid: Grid, place: Place, mesh: DeviceMesh) -> tuple[int, dist.ProcessGroup] | None:
    """The rank that has the other end of this one's replica, if it has one of them. mesh: of its stages."""
    if place.pp not in (0, grid.pp - 1):
        return None
    return grid.rank(place._replace(pp=grid.pp - 1 - place.pp)), mesh.get_group()

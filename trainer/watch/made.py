"""What watches a run and tells of it, as its settings have it."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from elastic.proto.env import process_environment
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.data.tokenizers import Tokenizer
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.footprint import footprint
from elastic.trainer.parallel.grid import Place
from elastic.trainer.parallel.layout import Laid, Layout
from elastic.trainer.run.plan import Plan
from elastic.trainer.watch import flops, memory, phases, probes
from elastic.trainer.watch import reporter as reporters
from elastic.trainer.watch.probes import ProbeSet
from elastic.trainer.watch.profiler import StepProfiler
from elastic.trainer.watch.progress import Progress
from elastic.trainer.watch.reporter import Reporter
from elastic.trainer.world import World


def reporter(
    settings: Settings,
    plan: Plan,
    config: GPTConfig,
    world: World,
    clock: phases.Clock,
    start: int,
    arguments: Mapping[str, Any],
) -> Reporter:
    """Of rank 0; start: finished steps; arguments: those that are shown, as scripts have them."""
    flags, watching = settings.logging, settings.watching
    return Reporter(
        flags, iterations=plan.steps, seq_length=config.seq_length, flops=flops.per_token(config),
        devices=world.size, peak=reporters.peak(watching, world.device), mfu=watching.log_mfu,
        sinks=reporters.sinks(
            flags, iteration=start, consumed=plan.consumed(start),
            save=settings.checkpointing.folder, arguments=arguments,
        ),
        metrics=reporters.metrics(watching), device=world.device, clock=clock,
    )  # fmt: skip


def progress(
    settings: Settings, plan: Plan, config: GPTConfig, world: World, start: int
) -> Progress | None:
    """Of rank 0, with --log-progress and a folder."""
    folder = settings.checkpointing.folder
    if not settings.logging.log_progress or folder is None:
        return None
    return Progress(
        folder, job=process_environment().get("SLURM_JOB_ID", ""), devices=world.size,
        flops=flops.per_token(config).megatron, tokens=plan.consumed(start) * config.seq_length,
    )  # fmt: skip


def probe_set(settings: Settings, config: GPTConfig, words: Tokenizer) -> ProbeSet | None:
    """With --probe-file."""
    flags = settings.watching
    if flags.probe_file is None:
        return None
    return ProbeSet(
        probes.read(flags.probe_file), words.encode, eod=words.eod, seq_length=config.seq_length,
        leaf_size=settings.schedules.micro_batch_size,
    )  # fmt: skip


def profiler(settings: Settings, world: World) -> StepProfiler | None:
    """On ranks that are profiled."""
    flags, folder = settings.watching, settings.logging.tensorboard_dir
    if not flags.profile or world.rank not in flags.profile_ranks:
        return None
    first, end, trace = flags.profile_step_start, flags.profile_step_end, None
    if flags.use_pytorch_profiler and folder is not None:
        # As TensorBoard's plugin wants it named.
        trace = folder / f"rank-{world.rank:05d}.steps-{first + 1}-{end}.pt.trace.json.gz"
    return StepProfiler(first, end, trace)


def footprint_line(config: GPTConfig, layout: Layout, laid: Laid, plan: Plan) -> str:
    """About the stage that takes the most."""
    leaves = plan.cut(plan.sizes.largest).per_rank(laid.grid.dp)
    stages = (
        footprint(
            config, layout, laid.grid, Place(0, stage, 0), leaf_size=plan.leaf_size, leaves=leaves,
            keeps_sent=laid.device.type == "cpu",
        )
        for stage in range(layout.pp)
    )  # fmt: skip
    device = None
    if laid.device.type == "cuda":
        device = torch.cuda.get_device_properties(laid.device).total_memory
    return memory.theoretical(max(stages, key=lambda one: one.total), device)


def out_of_memory(error: BaseException, settings: Settings) -> memory.OutOfMemoryError:
    """What is said where it ran out."""
    layout, rank = settings.layout, dist.get_rank() if dist.is_initialized() else 0
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    ranks = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    return memory.explained(
        error,
        where=f"rank {rank}",
        memory=memory.of_device(torch.device("cuda")) if on_gpu else None,
        advice=memory.advice(
            micro_batch_size=settings.schedules.micro_batch_size,
            recompute=layout.recompute_granularity, zero=layout.zero,
            data_parallel=dist.get_world_size() // ranks if dist.is_initialized() else 1,
            tensor_parallel=layout.tensor_model_parallel_size,
            attention_dropout=settings.model.attention_dropout,
        ),
        saved=settings.checkpointing.save is not None,
    )  # fmt: skip

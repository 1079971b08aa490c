"""What a spare of a rank does before it is needed: one step of a shallow model, by itself.

All blocks of a model have one graph between them, and a graph is the process's. So the rank that the spare becomes has
traced what it compiles, and loaded the kernels, which otherwise are most of its first step. It is `pretrain_gpt`'s model
and step, whatever script the rank runs: nothing of a team's is imported by a process that is to run it later. What theirs
does otherwise is traced when it is met.
"""

import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist

from elastic import session
from elastic.proto.env import process_environment
from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.current import set_current
from elastic.trainer.model import attention
from elastic.trainer.model.tensor_parallel import local
from elastic.trainer.parallel import kernels
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.run import begin
from elastic.trainer.watch.phases import NoClock

LAYERS = 2
"""A first one and another: what their inputs need is not the same."""
LEAVES = 2
"""At most: the first gradients are kept, others added to them."""
TOLD = ("model", "schedules", "tokenizer", "optimizer", "layout")
"""Of the settings, what says how a step computes."""


def announce(settings: Settings) -> None:
    """Have spares of this rank rehearse, where that saves anything and one process can do it."""
    layout = settings.parallel()
    if layout.compile and layout.pp == 1:  # stages wait for one another
        session.set_rehearsal(f"{__name__}:rehearse", argument(settings))


def argument(settings: Settings) -> str:
    """For `rehearse`."""
    subjects = [getattr(settings, name) for name in TOLD]
    told = {one.name: getattr(subject, one.name) for subject in subjects for one in fields(subject)}
    told["reset_position_ids"] = settings.data.reset_position_ids
    return json.dumps({"settings": told, "threads": torch.get_num_threads()}, default=str)


def rehearse(argument: str, device: str) -> None:
    """In a spare; argument: as `argument` makes it. Raises whatever stands in the way."""
    global _rehearsed
    told = json.loads(argument)
    settings = parse([], args_defaults=told["settings"])
    settings = replace(settings, model=replace(settings.model, num_layers=LAYERS))
    torch.set_num_threads(told["threads"])  # which graphs are guarded by
    # What DTensor keeps by thread, with the mesh that it was made for, goes with this one.
    with ThreadPoolExecutor(1) as thread:
        try:
            _rehearsed = thread.submit(_run, settings, torch.device(device)).result()
        except BaseException:
            torch._dynamo.reset()  # nobody knows of which half
            raise


_rehearsed: list[Any] | None = None
"""The compiler's settings, where this process has rehearsed: kernels of other ones may end with other bits."""


def settle(laid: Laid) -> None:
    """Once the model is laid out: what was rehearsed in another place, or under other settings of the compiler, is
    forgotten."""
    if _rehearsed is not None and _rehearsed != _fixed(laid):
        torch._dynamo.reset()


def _fixed(laid: Laid) -> list[Any]:
    """What graphs have as constants, and torch does not guard: who this rank is among those that share its layers, the
    name of their group, and the compiler's settings."""
    group = laid.mesh["tp"].get_group().group_name if laid.grid.tp > 1 else ""
    return [laid.place.tp, group, *_compilers()]


def _compilers() -> list[dict[str, Any]]:
    modules: Any = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
    found = [module.get_config_copy() for module in modules]
    found[1].pop("compile_threads")
    return found


def _run(settings: Settings, device: torch.device) -> list[Any]:
    """Returns what is fixed (`_fixed`)."""
    variables = process_environment()
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with ExitStack() as stack:
        for kept in (kernels.kept(), attention.kept(), _alone(rank, size)):
            stack.enter_context(kept)
        stack.enter_context(torch._inductor.config.patch(compile_threads=1))  # else it has a pool
        begin.introduce(settings, world_size=size, rank=rank)
        return _step(settings, device)


@contextmanager
def _alone(rank: int, size: int) -> Iterator[None]:
    """In a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        set_current(None)
        gc.collect()  # of what still holds the group, and the device's memory
        dist.destroy_process_group()


def _step(settings: Settings, device: torch.device) -> list[Any]:
    from elastic.trainer import pretrain_gpt  # which imports what imports this

    plan, layout = begin.plan_of(settings, settings.parallel()), settings.parallel()
    provider, forward_step = pretrain_gpt.model_provider, pretrain_gpt.forward_step
    laid = begin.model(plan, layout, provider, forward_step, device, NoClock())
    fixed = _fixed(laid)
    for parameter in laid.model.parameters():
        local(parameter.detach()).zero_()  # else their gradients may have no exact sum
    leaves = min(LEAVES, plan.cut(plan.sizes.largest).per_rank(laid.grid.dp))
    shape = (plan.leaf_size * leaves, settings.schedules.seq_length)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    batch = {"tokens": ids, "labels": ids, "position_ids": ids, "dataset_id": ids[:, 0]}
    batch["loss_mask"] = torch.ones(shape, device=device)
    keys = None if laid.dropout is None else laid.dropout.of(range(leaves))
    gradients, adam = laid.gradients, begin.optimizer(settings, laid)
    gradients.begin()
    laid.runner.run(batch, torch.ones(leaves, device=device), keys)
    gradients.exact()
    gradients.scale(gradients.norm())
    adam.step()
    return fixed

"""What a spare of a rank does before it is needed: one step of a shallow model, by itself.

All blocks of a model have one graph between them, and a graph is the process's. So the rank that the spare becomes has
traced what it compiles, and loaded the kernels, which otherwise are most of its first step.
"""

import gc
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist

from elastic import session
from elastic.proto.env import process_environment
from elastic.trainer.arguments.parse import Provider, parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.current import set_current
from elastic.trainer.model.tensor_parallel import local
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.parallel.program import ForwardStep
from elastic.trainer.run import begin
from elastic.trainer.run.begin import ModelProvider
from elastic.trainer.watch.phases import NoClock

LAYERS = 2
"""A first one and another: what their inputs need is not the same."""
LEAVES = 2
"""The first gradients are kept, others added to them."""


def announce(
    provider: ModelProvider,
    forward_step: ForwardStep,
    extra_args: Provider | None,
    defaults: Mapping[str, Any] | None,
) -> None:
    """Have spares of this rank rehearse, if they can import what the script has given to `pretrain`."""
    given: list[Any] = [provider, forward_step, *([extra_args] if extra_args else ())]
    if told := argument(sys.argv[1:], given, defaults):
        session.rehearse_by(f"{__name__}:rehearse", told)


def argument(
    argv: Sequence[str], functions: Sequence[Any], defaults: Mapping[str, Any] | None
) -> str:
    """For `rehearse`; functions: for the model, a step, and perhaps more arguments. Empty where another process cannot
    import one of them."""
    names = [_name(one) for one in functions]
    told = {
        "argv": list(argv), "functions": names, "defaults": dict(defaults or {}),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    return json.dumps(told, default=str) if all(names) else ""


def rehearse(argument: str, device: str) -> None:
    """In a spare; argument: as `argument` makes it. Raises whatever stands in the way."""
    told = json.loads(argument)
    provider, forward_step, *extra_args = (_function(name) for name in told["functions"])
    settings = parse(told["argv"], next(iter(extra_args), None), told["defaults"])
    layout = settings.parallel()
    if not layout.compile or layout.pp > 1:
        return  # stages wait for one another
    settings = replace(settings, model=replace(settings.model, num_layers=LAYERS))
    torch.set_num_threads(told["threads"])  # which graphs are guarded by
    # What DTensor keeps by thread, with the mesh that it was made for, goes with this one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_run, settings, provider, forward_step, torch.device(device)).result()


def _run(
    settings: Settings, provider: ModelProvider, forward_step: ForwardStep, device: torch.device
) -> None:
    variables = process_environment()
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with (
        _alone(rank, size),
        torch._inductor.config.patch(compile_threads=1),
    ):  # no pool of processes
        begin.introduce(settings, world_size=size, rank=rank)
        _step(settings, provider, forward_step, device)


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


def _step(
    settings: Settings, provider: ModelProvider, forward_step: ForwardStep, device: torch.device
) -> None:
    plan = begin.plan_of(settings, settings.parallel())
    global _rehearsed
    laid = begin.model(plan, settings.parallel(), provider, forward_step, device, NoClock())
    _rehearsed = _fixed(laid)
    for parameter in laid.model.parameters():
        local(parameter.detach()).zero_()  # else their gradients may have no exact sum
    shape = (plan.leaf_size * LEAVES, settings.schedules.seq_length)
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    batch = {"tokens": ids, "labels": ids, "position_ids": ids, "dataset_id": ids[:, 0]}
    batch["loss_mask"] = torch.ones(shape, device=device)
    keys = None if laid.dropout is None else laid.dropout.of(range(LEAVES))
    gradients, adam = laid.gradients, begin.optimizer(settings, laid)
    gradients.begin()
    laid.runner.run(batch, torch.ones(LEAVES, device=device), keys)
    gradients.exact()
    gradients.scale(gradients.norm())
    adam.step()


def _name(function: Any) -> str:
    """`module:function`, by which another process finds it; empty where none does."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<")
    if module == "__main__":
        module = getattr(sys.modules[module].__spec__, "name", "")  # of `python -m`
    return f"{module}:{name}" if module and name.isidentifier() else ""


def _function(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)

"""`-m tests.trainer.run.rehearsed [--rehearse] ARGUMENT ...`: `pretrain` of a script's own model, in ranks that have
rehearsed before, or not. Prints what is found of that, and the graphs of each step, as JSON lines."""

import functools
import gc
import json
import os
import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from elastic.agent.starters import warmup
from elastic.trainer import current, pretrain_gpt
from elastic.trainer.arguments.parse import parse
from elastic.trainer.model.gpt import GPT
from elastic.trainer.pretrain import pretrain
from elastic.trainer.run import rehearsal
from elastic.trainer.run.loop import Loop


def tell(**found: Any) -> None:
    sys.stdout.write(json.dumps({"rank": int(os.environ["RANK"]), **found}) + "\n")
    sys.stdout.flush()


def model_provider(pre_process: bool = True, post_process: bool = True) -> torch.nn.Module:
    return pretrain_gpt.model_provider(pre_process, post_process)


def rehearse(argv: list[str]) -> None:
    before = standing()
    told = rehearsal.argument(parse(argv))
    warmup.rehearse("elastic.trainer.run.rehearsal:rehearse", told, "cpu")
    tell(
        graphs=counters["stats"]["unique_graphs"],
        group=dist.is_initialized(),
        models=sum(type(one) is GPT for one in gc.get_objects()),
        run=current._current is not None,
        same=standing() == before,
    )


def standing() -> tuple[object, ...]:
    """What a rank begins with; that the compiler has a daemon for its progress bar is known."""
    threads = [one for one in threading.enumerate() if not one.daemon]
    untyped: Any = torch
    switches = (
        untyped.is_grad_enabled(), untyped.are_deterministic_algorithms_enabled(),
        untyped.backends.cuda.flash_sdp_enabled(), untyped.backends.cuda.math_sdp_enabled(),
        untyped.backends.cudnn.benchmark, untyped.utils.deterministic.fill_uninitialized_memory,
        untyped._inductor.config.deterministic,
    )  # fmt: skip
    return threads, torch.get_rng_state().tolist(), sys.stdout, sys.excepthook, switches


if __name__ == "__main__":
    if sys.argv[1] == "--rehearse":
        del sys.argv[1]
        torch.set_num_threads(1)  # as `pretrain` does
        rank = os.environ["RANK"]
        os.environ["RANK"] = os.environ.get("REHEARSES", rank)
        rehearse(sys.argv[1:])
        os.environ["RANK"] = rank
        if "CHANGED" in os.environ:  # by a script that starts as a rank
            torch._inductor.config.max_fusion_size = 32
    counters.clear()
    step = Loop._step

    @functools.wraps(step)
    def told_step(*args: Any) -> None:
        step(*args)
        objects = len(gc.get_objects())
        tell(step=args[2] + 1, graphs=counters["stats"]["unique_graphs"], objects=objects)

    Loop._step = told_step  # type: ignore[assignment,method-assign]
    datasets = pretrain_gpt.train_valid_test_datasets_provider
    pretrain(datasets, model_provider, None, pretrain_gpt.forward_step)

"""What is saved of a run, and how one goes on from it."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic import session
from elastic.checkpoint import Checkpointer
from elastic.proto.errors import CheckpointDamaged, CheckpointError, UsageError
from elastic.proto.manifest import step_of
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.checkpoints import check_weights, config_of, identity_of
from elastic.trainer.convert.reading import CONFIG
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.layout import Laid, Layout
from elastic.trainer.run import recipe
from elastic.trainer.run.plan import Plan
from elastic.trainer.watch.reporter import say

State = dict[str, Any]

OWN = ("identity", "conditions", "recipe", "job")
"""What stays a run's own, whatever it goes on from."""
LATER = ("loss_scale", "reports")
"""What a checkpoint may lack."""
MEGATRONS = "latest_checkpointed_iteration.txt"
"""Which a folder of its checkpoints has."""


def identity(
    config: GPTConfig, plan: Plan, *, seed: int, tokenizer: str, data: str
) -> dict[str, Any]:
    """What a run is: with another one of these, it would be another run. tokenizer: its digest; data: a digest of the
    order."""
    stages = [list(stage) for stage in plan.sizes.stages]
    return {
        **identity_of(config), "seed": seed, "batch_sizes": stages, "tokenizer": tokenizer, "data": data,
    }  # fmt: skip


def conditions(layout: Layout, plan: Plan, laid: Laid) -> dict[str, Any]:
    """What the bits of an exact run depend on, beside what it is and its recipe."""
    device = laid.device
    on_gpu = device.type == "cuda"
    cpu = f"cpu {torch.backends.cpu.get_cpu_capability()}"  # vectors of another width add up otherwise
    return {
        "reduction": "exact" if layout.exact else "fast",
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu,
        "tensor parallel": layout.tp,
        "sequence parallel": layout.sequence,
        "pipeline parallel": layout.pp,
        "micro-batch size": plan.leaf_size,
        "computes in": str(layout.compute).removeprefix("torch."),
        "fp32 multiplied in": _multiplied(device) if layout.compute is torch.float32 else "",
        "compiled": layout.compile,
        # Kernels are cut elsewhere, and may round elsewhere.
        "recomputed within compiled blocks": layout.compile
        and layout.recompute.granularity == "selective",
        "attention kernel": laid.attention,
        "optimizer on": cpu if layout.offload == "all" or not on_gpu else "cuda",
        "threads": 0 if on_gpu else torch.get_num_threads(),  # one, but for scripts that set them
        "torch": str(torch.__version__),
    }


def _multiplied(device: torch.device) -> str:
    """What fp32 matrices are rounded to on the way: by torch's setting, which images set by a variable, too."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return str(backend.matmul.fp32_precision).replace("none", "ieee")  # where nobody has said


def agree(told: Mapping[str, Any], device: torch.device) -> None:
    """Raises `UsageError`, on all ranks, where one is told something else than rank 0: each node has a command
    line of its own, and its own copy of the data. All ranks call it, with the same names."""
    every = torch.zeros(dist.get_world_size(), len(told), dtype=torch.int64, device=device)
    every[dist.get_rank()] = torch.tensor(
        [_digest(value) for value in told.values()], device=device
    )
    dist.all_reduce(every)  # each row is one rank's
    for name, column in zip(told, every.t().tolist(), strict=True):
        others = [rank for rank, found in enumerate(column) if found != column[0]]
        if others:
            raise UsageError(
                f"{name} of rank {others[0]} is not that of rank 0: start all nodes with the same arguments, on "
                "the same data and, with --reduction exact or where replicas are compared, on machines of one kind"
            )


def _digest(value: Any) -> int:
    """56 bits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")


def job() -> dict[str, Any]:
    """The job that trains, as it is saved: by which launch, when that began (Unix, ms), and, later, whether it ends
    behind the step. Ranks that are started anew in it find this again. The same on all ranks, which all call it: else
    what replicas save would not be."""
    found = session.current()
    began = -_largest(-int(1000 * time.time()))  # the first rank's
    return {"launch": "" if found is None else found.launch, "began": began}


def resume(
    checkpoint: Checkpointer, state: State, flags: CheckpointFlags, *, exact: bool
) -> tuple[int, list[str]]:
    """Load the newest of --save; returns the number of finished steps, 0 without any, and what is to be said.

    UsageError when it is of another run, or in exact mode made under other conditions: what came of it
    would be something else.
    """
    said: list[str] = []

    def attempt(wanted: int | None) -> int:
        found: State = dict.fromkeys((*OWN, *LATER))
        step = _alike(lambda: checkpoint.load(found, step=wanted, strict=False))
        if step == 0:
            return 0
        before, now = found["job"], state["job"]
        if isinstance(before, Mapping) and now["launch"] and before.get("launch") == now["launch"]:
            state["job"] = dict(before)
        _check(found, state, step, checkpoint.path, conditions=exact and not flags.other_conditions)
        said[:] = _others(found, state)
        return _load(checkpoint, state, step, found)

    return _sound(attempt, checkpoint.path), said


def _others(found: State, state: State) -> list[str]:
    """What a run that goes on has otherwise than what it goes on from, as far as that says it."""
    known, now = found["conditions"], state["conditions"]
    both = known.keys() & now.keys()  # other versions have others
    before, after = (
        {name: one for name, one in told.items() if name in both} for told in (known, now)
    )
    said = {
        "resumed with another recipe": recipe.changed(found["recipe"], state["recipe"]),
        "resumed under other conditions": recipe.changed(before, after),
    }
    return [f"{what}: {which}" for what, which in said.items() if which]


def _sound(attempt: Callable[[int | None], int], where: str) -> int:
    """What `attempt` comes to with the newest step, or, as often as any rank finds damage in it, with the one
    before it on storage. A job does that by itself, with its ranks started anew. All ranks call it."""
    step: int | None = None
    while True:
        finished, older, why = 0, 0, "on another rank"
        try:
            finished = attempt(step)
        except CheckpointDamaged as error:
            if not error.older:
                raise
            older, why = error.older, error.what
        if not (step := _largest(older)):
            return finished
        if not dist.is_initialized() or dist.get_rank() == 0:
            say(f"what is newest in {where} is damaged ({why}): the run goes on from step {step}")


def _alike(load: Callable[[], int]) -> int:
    """What it comes to, or the damage that any rank finds by it: the next load is one of all ranks."""
    step, older, what = 0, 0, "on another rank"
    try:
        step = load()
    except CheckpointDamaged as error:
        if not error.older:
            raise
        older, what = error.older, error.what
    if older := _largest(older):
        raise CheckpointDamaged(what, older=older)
    return step


def _largest(number: int) -> int:
    """Of all ranks'."""
    if not dist.is_initialized():
        return number
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    every = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return int(every)


def load(checkpoint: Checkpointer, state: State, step: int | None = None) -> int:
    """Load the newest, or that of `step`; its number, 0 without any. What the run is, its conditions, its recipe and its
    job stay its own: what is saved from then on is made by them. A loss scale begins anew where there was none, and so do
    the names of reports."""
    found: State = dict.fromkeys(LATER)
    _alike(lambda: checkpoint.load(found, step=step, strict=False))
    return _load(checkpoint, state, step, found)


def _load(checkpoint: Checkpointer, state: State, step: int | None, found: State) -> int:
    """found: what is there of `LATER`."""
    without = {*OWN, *(name for name in LATER if found[name] is None)}
    wanted = {name: one for name, one in state.items() if name not in without}
    loaded = checkpoint.load(wanted, step=step)
    state.update(wanted)
    return loaded


def begin(state: State, flags: CheckpointFlags) -> tuple[int, list[str]]:
    """Load from --load what it is to begin from; returns the number of finished steps, 0 without any, and
    what is to be said.

    UsageError where there is nothing and the user counts on it, and where it is of another run.
    """
    assert flags.load is not None
    if flags.goes_on:  # where there was nothing
        return 0, [_missing(flags, flags.load)]
    with Checkpointer(flags.load, read_only=True) as other:
        said: list[str] = []

        def attempt(wanted: int | None) -> int:
            step, said[:] = _take(other, state, flags, wanted)
            return step

        if flags.ckpt_step is None:
            step = _sound(attempt, other.path)
        else:
            try:
                step = attempt(flags.ckpt_step)
            except CheckpointDamaged as error:
                if not error.older:
                    raise
                raise CheckpointError(
                    f"{error.what}; --ckpt-step {error.older} takes the step before it"
                ) from error
    if step == 0:
        return 0, [_missing(flags, flags.load)]
    if flags.finetune:
        return 0, [f"weights of step {step} in {other.path}"]
    return step, said


def _take(
    other: Checkpointer, state: State, flags: CheckpointFlags, wanted: int | None
) -> tuple[int, list[str]]:
    """Load what the run begins from; the step that it is of, 0 without any, and what is to be said."""
    found: State = dict.fromkeys((*OWN, *LATER))
    step = _alike(lambda: other.load(found, step=wanted, strict=False))
    if step == 0:
        return 0, []
    if flags.finetune:
        check_weights(found["identity"], config_of(state["identity"], "this run"), other.path)
        other.load({"model": state["model"]}, step=step)
        return step, []
    _check(found, state, step, other.path, conditions=False)
    taken = dict(state)
    if flags.no_load_optim:
        taken.pop("optimizer")
    _load(other, taken, step, found)
    state.update(taken)
    return step, _others(found, state)


def _missing(flags: CheckpointFlags, where: str) -> str:
    """What is said where --load has no checkpoint; UsageError where the run would not be what is meant."""
    said = f"--load {where} holds no checkpoint"
    if (step := step_of(Path(where).name)) is not None:
        above = where.rstrip("/").rpartition("/")[0] or "."
        raise UsageError(
            f"--load {where} is one step: give --load {above}, and --ckpt-step {step} if it is not the newest"
        )
    if (Path(where) / CONFIG).is_file():
        raise UsageError(
            f"{said}, but a model of Hugging Face's: make it one by `elasticctl hf import {where} DEST`, "
            "and give --load DEST --finetune"
        )
    if (Path(where) / MEGATRONS).is_file():
        raise UsageError(
            f"{said} of ours, but Megatron's, which is not read: convert it to Hugging Face's by Megatron's tools, "
            "make that one by `elasticctl hf import`, and give --load DEST --finetune"
        )
    if flags.finetune or flags.exit_on_missing_checkpoint:
        raise UsageError(said)
    return f"{said}: the run begins from first weights"


def _check(found: State, state: State, step: int, where: str, *, conditions: bool) -> None:
    if not isinstance(found["identity"], Mapping):
        raise UsageError(
            f"{where} is no checkpoint of elastic.trainer: give another --save or --load"
        )
    if not isinstance(found["conditions"], Mapping):
        raise UsageError(
            f"{where} holds a model alone: give --load {where} --finetune and another --save"
        )
    for name, mine in state["identity"].items():
        theirs = found["identity"].get(name)
        if name == "data" and not mine:
            continue  # with --skip-train there may be nothing to train on
        if name == "tokenizer" and theirs is None:
            continue  # of before it was written down
        if name == "data" and str(theirs).isdecimal():
            continue  # a script's, of which there was its length
        if theirs != mine and name == "tokenizer":
            raise UsageError(
                f"step {step} in {where} was trained with another tokenizer: give that one, or --load {where} "
                "--finetune and another --save"
            )
        if theirs != mine and name == "data":
            raise UsageError(
                f"step {step} in {where} was trained on other samples, in another order, or with another loss mask "
                "or other position ids: give the same data, --split and tokenizer, --eod-mask-loss and "
                "--reset-position-ids, and a --train-iters that takes as many epochs of the data; or "
                "another --save"
            )
        if theirs != mine:
            shown = f"{name} {theirs}, not {mine}"
            if name == "batch_sizes":
                shown = f"batches of {_batches(theirs)} samples, not {_batches(mine)}"
            raise UsageError(
                f"step {step} in {where} has {shown}: give the same value, or another --save"
            )
    for name, mine in (state["conditions"] if conditions else {}).items():
        theirs = found["conditions"].get(name, mine)  # one that was not written down then
        if theirs != mine:
            raise UsageError(
                f"step {step} in {where} was made with {name} {theirs}, not {mine}, so the run would not "
                "go on with the same bits: give the same, or --other-conditions"
            )


def _batches(stages: Any) -> str:
    """`16, from sample 320 on 32`."""
    first, *later = stages
    return ", ".join([str(first[1]), *(f"from sample {begin} on {size}" for begin, size in later)])

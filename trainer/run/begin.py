"""What a run works with when it begins: its samples, where it saves, and its state as of the step it goes on from."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from elastic.checkpoint import Checkpointer
from elastic.proto.errors import UsageError
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.arguments.namespace import namespace
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.current import Current, current, set_current
from elastic.trainer.data import tokenizers
from elastic.trainer.data.gpt_dataset import asked
from elastic.trainer.data.items import Dataset
from elastic.trainer.data.splits import NAMES
from elastic.trainer.data.tokenizers import Tokenizer
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Laid, Layout, Part, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.parallel.program import ForwardStep
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run import state as states
from elastic.trainer.run.loss_scale import LossScale
from elastic.trainer.run.plan import Plan
from elastic.trainer.run.recipe import recipe
from elastic.trainer.run.replicas import Replicas, note
from elastic.trainer.watch import guard
from elastic.trainer.watch.phases import Clock
from elastic.trainer.watch.timers import Timers

ModelProvider = Callable[..., nn.Module]
"""Called with pre_process and post_process: whether the part has the embedding, and the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """What a run trains on and evaluates with, as far as it does."""

    train: Dataset | None
    validation: Sequence[Dataset]
    test: Dataset | None


def plan_of(settings: Settings, layout: Layout) -> Plan:
    """Which samples each step has, and how they are cut."""
    multiple, least = legal(layout.schedule, layout.pp)
    return Plan(
        sizes=settings.schedules.batch_sizes(),
        steps=settings.schedules.steps(),
        leaf_size=settings.schedules.micro_batch_size,
        multiple=multiple,
        at_least=least,
    )


def samples(settings: Settings, plan: Plan) -> list[int | None]:
    """How many of each split are asked for; None: all that there are."""
    wanted = asked(
        plan.samples,
        train_iters=plan.steps,
        eval_interval=settings.evaluation.eval_interval,
        eval_iters=settings.evaluation.eval_iters,
        global_batch_size=plan.sizes.largest,
        full_validation=settings.evaluation.full_validation,
    )
    return [wanted.train, wanted.valid, wanted.test]


def checked(found: Any, settings: Settings, plan: Plan) -> Data:
    """Of what the script's function gave what the run uses. UsageError where it would miss something of it, be it
    days from now."""
    if not isinstance(found, Sequence) or len(found) != len(NAMES):
        raise UsageError(
            f"train_valid_test_dataset_provider is to return {', '.join(NAMES)}: three, or None for each"
        )
    train, valid, test = found
    several = isinstance(valid, Sequence) and not (valid and isinstance(valid[0], Mapping))
    sets = () if valid is None else valid if several else (valid,)
    if not settings.evaluation.eval_iters:
        test = None
        sets = sets if settings.evaluation.full_validation else ()
    if not settings.evaluation.skip_train:
        if train is None:
            raise UsageError(
                "there is nothing to train on: give --data-path or --train-data-path, or --skip-train"
            )
        _check_length("train", train)
        if len(train) < plan.samples:
            raise UsageError(
                f"the run trains on {plan.samples} samples, and the data have {len(train)}: make it shorter, "
                "or have the script's dataset repeat its own"
            )
        _check_sample("train", train[0])
    for name, one in (*(("validation", one) for one in sets), ("test", test)):
        if one is None:
            continue
        _check_length(name, one)
        if not len(one):
            raise UsageError(f"there are {name} data without any sample: leave them out")
        sample = one[0]
        _check_sample(name, sample)
        if "loss_mask" not in sample:
            raise UsageError(
                f"samples of the {name} data have no loss_mask, by which an evaluation leaves out those that only fill "
                "up: give them one, of ones where all tokens count, or return None for these data"
            )
    return Data(train=train, validation=sets, test=test)


def _check_length(name: str, data: Any) -> None:
    try:
        len(data)
    except TypeError:
        raise UsageError(
            f"the {name} data, of type {type(data).__name__}, have no length: give a dataset whose samples have "
            "numbers, by __len__ and __getitem__"
        ) from None


def _check_sample(name: str, sample: Any) -> None:
    """As `Loader` reads it."""
    if not isinstance(sample, Mapping):
        raise UsageError(
            f"a sample of the {name} data is of type {type(sample).__name__}: give a dict of arrays, such as tokens, "
            "labels and loss_mask"
        )
    for key, value in sample.items():
        try:
            torch.from_numpy(np.stack([np.asarray(value)]))
        except (TypeError, ValueError):
            raise UsageError(
                f"{key!r} in a sample of the {name} data, of type {type(value).__name__}, is no array of numbers: leave "
                "it out, or make it one"
            ) from None


def digest(data: Dataset | None) -> str:
    """What is the same where samples and their order are, as far as a script's dataset says so. Nothing of its length,
    which may be what the run asks for, and runs are made longer."""
    return "" if data is None else str(getattr(data, "digest", type(data).__qualname__))


def _told(data: Dataset | None) -> list[Any]:
    """What all ranks are to have alike."""
    return [] if data is None else [digest(data), len(data)]


# --- its model -----------------------------------------------------------------------------------


def introduce(settings: Settings, *, world_size: int, rank: int) -> None:
    """From now on the script's functions may ask for the run (`current`). UsageError where its vocabulary cannot be
    shared out."""
    words, flags = tokenizers.build(settings.tokenizer), settings.logging
    multiple = settings.tokenizer.make_vocab_size_divisible_by
    config = settings.config(vocab_size=tokenizers.padded(words.vocab_size, multiple))
    config.check_split(settings.parallel().tp)
    args = namespace(
        settings, world_size=world_size, rank=rank, padded_vocab_size=config.vocab_size
    )
    timers = Timers(flags.timing_log_level, flags.timing_log_option)
    set_current(
        Current(settings=settings, tokenizer=words, config=config, args=args, timers=timers)
    )


def model(
    plan: Plan,
    layout: Layout,
    provider: ModelProvider,
    forward_step: ForwardStep,
    device: torch.device,
    clock: Clock,
) -> Laid:
    """This rank's part of the run's model, with any weights. All ranks call it."""
    run = current()

    def make(part: Part) -> nn.Module:
        run.part = part
        return provider(pre_process=part.first, post_process=part.last)

    run.laid = lay_out(
        run.config, layout, make=make, forward_step=forward_step, clock=clock,
        leaf_size=plan.leaf_size, leaves=plan.sizes.largest // plan.leaf_size,
        seed=run.settings.model.seed, device=device,
    )  # fmt: skip
    return run.laid


# --- where it saves ------------------------------------------------------------------------------


def checkpointer(settings: Settings) -> Checkpointer | None:
    """None without --save."""
    flags = settings.checkpointing
    if flags.save is None:
        return None
    return Checkpointer(flags.save, keep=flags.keep)


def make_folder(flags: CheckpointFlags) -> None:
    """Before minutes are spent on what could not be saved."""
    if flags.folder is not None:
        with _writing(flags):
            flags.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(flags.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _writing(flags: CheckpointFlags) -> Iterator[None]:
    """What goes wrong in it is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--save {flags.save} cannot be written to: {error.strerror}; give another folder"
        ) from error


def keep_tokenizer(flags: CheckpointFlags, tokenizer: Tokenizer, finished: int) -> list[str]:
    """Beside the checkpoints, for whoever reads them; returns what is to be said. finished: steps.

    UsageError where another one is there of a run that goes on, as beside checkpoints that do not say theirs.
    """
    if flags.folder is None:
        return []
    with _writing(flags):
        other = tokenizers.another(flags.folder, tokenizer)
        if other and finished:
            raise UsageError(
                f"--save {flags.save} has another tokenizer than this run: give that one, or another --save"
            )
        tokenizer.save(flags.folder)
    return [f"another tokenizer was kept in {flags.save}, and is replaced"] if other else []


# --- its state -----------------------------------------------------------------------------------


def optimizer(settings: Settings, laid: Laid) -> torch.optim.Optimizer:
    """AdamW, without rates yet."""
    flags = settings.optimizer
    return optimizers.build(
        laid.model,
        betas=(flags.adam_beta1, flags.adam_beta2),
        eps=flags.adam_eps,
        on_host=settings.parallel().offload == "optimizer",
    )


def loss_scale(settings: Settings) -> LossScale | None:
    """Of fp16."""
    scaling = settings.optimizer.loss_scaling()
    return None if scaling is None else LossScale(scaling)


def replicas(
    settings: Settings,
    laid: Laid,
    adam: torch.optim.Optimizer,
    checkpoint: Checkpointer | None,
) -> tuple[Replicas | None, list[str]]:
    """What compares them, and what is to be said of it; None where that is not asked for, or there is one."""
    interval, zero = (
        settings.watching.check_weight_hash_across_dp_replicas_interval,
        settings.layout.zero,
    )
    if interval is None:
        return None, []
    said = [note(laid.grid.dp, zero=zero)]
    if laid.grid.dp == 1:
        return None, said
    return Replicas(laid, adam, checkpoint, zero=zero, interval=interval), said


def state_of(
    settings: Settings,
    plan: Plan,
    config: GPTConfig,
    laid: Laid,
    adam: torch.optim.Optimizer,
    scale: LossScale | None,
    train: Dataset | None,
) -> states.State:
    """All that is saved of the run, before its first step."""
    identity = states.identity(
        config, plan, seed=settings.model.seed, tokenizer=current().tokenizer.digest, data=digest(train)
    )  # fmt: skip
    return {
        "identity": identity,
        "conditions": states.conditions(settings.parallel(), plan, laid),
        "recipe": recipe(settings),
        "model": laid.model,
        "optimizer": adam,
        "tops": laid.gradients.tops,
        "guard": guard.to_json(guard.State()),
        "reports": [],
        "job": states.job(),
    } | ({} if scale is None else {"loss_scale": scale.state})


def agree(
    settings: Settings, state: states.State, data: Data, probes: int, device: torch.device
) -> None:
    """UsageError, on all ranks, where nodes were told different things. probes: how many there are."""
    watching = settings.watching  # replicas on devices of two kinds need not compute the same bits
    alike = settings.parallel().exact or watching.check_weight_hash_across_dp_replicas_interval
    conditions = {name: one if alike else None for name, one in state["conditions"].items()}
    others = {
        "training data": _told(data.train), "validation data": [_told(one) for one in data.validation],
        "test data": _told(data.test), "number of probes": probes,
    }  # fmt: skip
    states.agree({**state["identity"], **conditions, **others, **settings.common()}, device)


def start(
    settings: Settings,
    plan: Plan,
    config: GPTConfig,
    checkpoint: Checkpointer | None,
    state: states.State,
) -> tuple[int, list[str]]:
    """Set the weights, and all else of `state`; returns the number of steps that are finished already, and what
    is to be said."""
    flags, model, notes = settings.checkpointing, settings.model, []
    finished = 0
    if checkpoint is None:
        notes.append("no --save: nothing is saved, and a run that is killed begins again")
    else:
        exact = settings.parallel().exact
        finished, said = states.resume(checkpoint, state, flags, exact=exact)
        notes += said
        if flags.save_interval is None:
            notes.append(
                "no --save-interval: steps are kept in memory, and on storage at the end, at a drain or a "
                "signal only"
            )
    if finished == 0:  # else they are there already, and drawing them takes longer than a restore
        initialize(state["model"], config, model.seed, model.init_method_std)
    if finished == 0 and flags.load is not None:
        finished, said = states.begin(state, flags)
        notes += said
    notes.append(f"resumed from step {finished}" if finished else "starting from step 0")
    if settings.evaluation.skip_train and not finished and not flags.finetune:
        notes.append("--skip-train without a checkpoint: what is evaluated are first weights")
    if finished >= plan.steps:
        notes.append(f"nothing to train: {finished} of {plan.steps} iterations are finished")
    return finished, notes

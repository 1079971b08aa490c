"""`pretrain`: what a training script calls, under Megatron's name and with Megatron's parameters.

from elastic.trainer.pretrain import get_args, pretrain, print_rank_0

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
"""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic import session
from elastic.checkpoint import Checkpointer
from elastic.proto.env import process_environment
from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.arguments.checkpointing import CheckpointFlags
from elastic.trainer.arguments.namespace import namespace
from elastic.trainer.arguments.parse import Provider, parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.current import Current, current, reading, set_current
from elastic.trainer.data import tokenizers
from elastic.trainer.data.gpt_dataset import asked
from elastic.trainer.data.items import Dataset
from elastic.trainer.data.splits import NAMES
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel import kernels
from elastic.trainer.parallel.footprint import footprint
from elastic.trainer.parallel.grid import Place
from elastic.trainer.parallel.layout import Laid, Layout, Part, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.parallel.program import ForwardStep
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run import state as states
from elastic.trainer.run.loop import Loop, Run
from elastic.trainer.run.loss_scale import LossScale
from elastic.trainer.run.non_loss import NonLoss
from elastic.trainer.run.plan import Plan
from elastic.trainer.run.step import Stepper
from elastic.trainer.watch import flops, guard, memory, phases, probes, reporter
from elastic.trainer.watch.probes import ProbeSet
from elastic.trainer.watch.profiler import StepProfiler
from elastic.trainer.watch.progress import Progress
from elastic.trainer.watch.reporter import Reporter, say
from elastic.trainer.watch.timers import Timers
from elastic.trainer.world import World, joined

Datasets = Callable[[Sequence[Any]], tuple[Any, Any, Any]]
"""From numbers of samples to train, validation and test; None for what there is not. With --full-validation
the number of validation is None: all that there are."""
EmbeddingRanks = Callable[[list[int]], Sequence[int]] | None
"""Of a pipeline's ranks, those that have an embedding."""
ModelProvider = Callable[..., nn.Module]
"""Called with pre_process and post_process: whether the part has the embedding, and the head."""


def pretrain(
    train_valid_test_dataset_provider: Datasets,
    model_provider: ModelProvider,
    model_type: Any,
    forward_step_func: ForwardStep,
    process_non_loss_data_func: Callable[[Any, int, Any], object] | None = None,
    extra_args_provider: Provider | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: EmbeddingRanks = None,
    get_position_embedding_ranks: EmbeddingRanks = None,
    non_loss_data_func: Callable[[list[nn.Module]], Any] | None = None,
) -> None:
    """Train as the command line says. A user's mistake is one line, and exit status 2.

    model_type is not looked at. process_non_loss_data_func, non_loss_data_func: `run/non_loss.py`.
    get_embedding_ranks, get_position_embedding_ranks: of a pipeline's ranks those with an embedding; what
    is not the first and the last one, and the first one, is refused.
    """
    try:
        settings = parse(sys.argv[1:], extra_args_provider, args_defaults)
        _check_embeddings(settings, get_embedding_ranks, get_position_embedding_ranks)
        writes = settings.logging.tensorboard_dir is not None
        non_loss = NonLoss(
            process=process_non_loss_data_func if writes else None,
            of_model=non_loss_data_func,
            step=forward_step_func,
        )
        non_loss.check(settings.parallel().pp)
        _pretrain(settings, train_valid_test_dataset_provider, model_provider, non_loss)
    except (UsageError, CheckpointError) as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None  # whoever pressed ^C knows
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        raise SystemExit(memory.end(_explained(error, settings))) from None


def get_args() -> Any:
    """The run's arguments under Megatron's names."""
    return current().args


def get_timers() -> Timers:
    """Megatron's timers, at --timing-log-level."""
    return current().timers


def print_rank_0(message: object) -> None:
    """Print on rank 0; everywhere where there is no process group yet."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        say(str(message))


def _explained(error: BaseException, settings: Settings) -> memory.OutOfMemoryError:
    """What is said where memory ran out."""
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
    )  # fmt: skip


def _progress(
    settings: Settings, plan: Plan, config: GPTConfig, world: World, start: int
) -> Progress | None:
    folder = settings.checkpointing.folder
    if not settings.logging.log_progress or folder is None:
        return None
    return Progress(
        folder, job=process_environment().get("SLURM_JOB_ID", ""), devices=world.size,
        flops=flops.per_token(config).megatron, tokens=plan.consumed(start) * config.seq_length,
    )  # fmt: skip


def _probes(settings: Settings, config: GPTConfig) -> ProbeSet | None:
    flags, words = settings.watching, current().tokenizer
    if flags.probe_file is None:
        return None
    return ProbeSet(
        probes.read(flags.probe_file), words.encode, eod=words.eod, seq_length=config.seq_length,
        leaf_size=settings.schedules.micro_batch_size,
    )  # fmt: skip


def _check_embeddings(settings: Settings, words: EmbeddingRanks, positions: EmbeddingRanks) -> None:
    """Raises `UsageError` where a pipeline's ranks 0, 1, ... are to have embeddings otherwise than here."""
    ranks = list(range(settings.parallel().pp))
    for name, function, ours in (
        ("get_embedding_ranks", words, {ranks[0], ranks[-1]}),
        ("get_position_embedding_ranks", positions, {ranks[0]}),
    ):
        if function is not None and set(found := function(ranks)) != ours:
            raise UsageError(
                f"{name}: of pipeline ranks {ranks} it wants {list(found)} to have an embedding, and here "
                f"{sorted(ours)} have: leave it out"
            )


def _pretrain(
    settings: Settings,
    datasets: Datasets,
    provider: ModelProvider,
    non_loss: NonLoss,
) -> None:
    layout = settings.parallel()
    session.declare_rank_unit(layout.tp * layout.pp)
    if layout.exact and layout.tp > 1:
        kernels.ring()
    with joined() as world:
        if layout.exact and world.device.type == "cpu":
            torch.set_num_threads(1)  # their number changes bits, and a resize changes the number
        settings.layout.check_world(world.size)
        for note in settings.notes:
            print_rank_0(note)
        words = tokenizers.build(settings.tokenizer)
        padding = words.vocab_size, settings.tokenizer.make_vocab_size_divisible_by
        print_rank_0(tokenizers.padding_line(*padding))
        config = settings.config(vocab_size=tokenizers.padded(*padding))
        args = namespace(
            settings, world_size=world.size, rank=world.rank, padded_vocab_size=config.vocab_size
        )
        flags = settings.logging
        timers = Timers(flags.timing_log_level, flags.timing_log_option)
        set_current(
            Current(settings=settings, tokenizer=words, config=config, args=args, timers=timers)
        )
        with contextlib.ExitStack() as stack:
            watching = settings.watching
            if watching.record_memory_history:
                stack.enter_context(memory.recorded(watching.memory_snapshot_path, world.rank))
            _run(settings, layout, world, config, datasets, provider, non_loss)


def _run(
    settings: Settings,
    layout: Layout,
    world: World,
    config: GPTConfig,
    datasets: Datasets,
    provider: ModelProvider,
    non_loss: NonLoss,
) -> None:
    plan, looked_at = _plan(settings, layout), _probes(settings, config)
    profiler = _profiler(settings, world)
    if world.is_first:
        _make_folder(settings.checkpointing)
    train, valid, test = _checked(datasets(_samples(settings, plan)), settings, plan)
    args = current().args
    args.do_train, args.do_valid, args.do_test = train is not None, bool(valid), test is not None
    clock = phases.clock(
        settings.watching.trace_phases, world.rank, cuda=world.device.type == "cuda"
    )
    laid = lay_out(
        config, layout,
        make=lambda part: _made(provider, part), forward_step=non_loss.forward_step, clock=clock,
        leaf_size=plan.leaf_size, leaves=plan.sizes.largest // plan.leaf_size,
        seed=settings.model.seed, device=world.device,
    )  # fmt: skip
    current().laid = laid
    print_rank_0(f"number of parameters: {config.parameter_count}")
    print_rank_0(_footprint(config, layout, laid, plan))
    adam = optimizers.build(
        laid.model,
        betas=(settings.optimizer.adam_beta1, settings.optimizer.adam_beta2),
        eps=settings.optimizer.adam_eps,
        on_host=layout.offload == "optimizer",
    )
    scaling = settings.optimizer.loss_scaling()
    scale = None if scaling is None else LossScale(scaling)
    state: states.State = {
        "identity": states.identity(config, plan, seed=settings.model.seed, data=_digest(train)),
        "conditions": states.conditions(layout, plan, laid),
        "model": laid.model,
        "optimizer": adam,
        "tops": laid.gradients.tops,
        "guard": guard.to_json(guard.State()),
    } | ({} if scale is None else {"loss_scale": scale.state})
    checkpoint = _checkpointer(settings)
    others = {
        "validation data": [_digest(one) for one in valid], "test data": _digest(test),
        "number of probes": 0 if looked_at is None else len(looked_at),
    }  # fmt: skip
    start = _start(settings, config, checkpoint, state, world.device, others, exact=layout.exact)
    args.iteration = args.curr_iteration = start
    args.consumed_train_samples = plan.consumed(start)
    print_rank_0(f"resumed from step {start}" if start else "starting from step 0")
    if settings.evaluation.skip_train and not start and not settings.checkpointing.finetune:
        print_rank_0("--skip-train without a checkpoint: what is evaluated are first weights")
    if start >= plan.steps:
        print_rank_0(f"nothing to train: {start} of {plan.steps} iterations are finished")
    told = _reporter(settings, plan, config, world, clock, start) if world.is_first else None
    if world.is_first and settings.checkpointing.folder is not None:
        with _writing(settings.checkpointing):
            current().tokenizer.save(settings.checkpointing.folder)
    loop = Loop(
        Run(
            settings=settings, plan=plan, laid=laid,
            stepper=Stepper(laid, leaf_tokens=plan.leaf_size * config.seq_length),
            optimizer=adam, loss_scale=scale, state=state,
            train=train, validation=valid, test=test, checkpoint=checkpoint, reporter=told,
            clock=clock, timers=current().timers, profiler=profiler, probes=looked_at, non_loss=non_loss,
            progress=_progress(settings, plan, config, world, start) if world.is_first else None,
        )
    )  # fmt: skip
    with reading(train):
        finished = start if settings.evaluation.skip_train else loop.train(start)
    done = finished == plan.steps or settings.evaluation.skip_train
    if done and (args.do_valid or args.do_test):
        loop.evaluate(finished, final=True)
    if told is not None:
        told.close()
    clock.close()
    if checkpoint is not None:
        checkpoint.close()
    current().laid = None  # which goes before the process group does


def _footprint(config: GPTConfig, layout: Layout, laid: Laid, plan: Plan) -> str:
    """The line about the stage that takes the most."""
    leaves = plan.sizes.largest // plan.leaf_size // laid.grid.dp
    stages = (
        footprint(
            config, layout, laid.grid, Place(0, stage, 0), leaf_size=plan.leaf_size, leaves=leaves
        )
        for stage in range(layout.pp)
    )
    device = None
    if laid.device.type == "cuda":
        device = torch.cuda.get_device_properties(laid.device).total_memory
    return memory.theoretical(max(stages, key=lambda one: one.total), device)


def _plan(settings: Settings, layout: Layout) -> Plan:
    multiple, least = legal(layout.schedule, layout.pp)
    return Plan(
        sizes=settings.schedules.batch_sizes(),
        steps=settings.schedules.steps(),
        leaf_size=settings.schedules.micro_batch_size,
        multiple=multiple,
        at_least=least,
    )


def _samples(settings: Settings, plan: Plan) -> list[int | None]:
    wanted = asked(
        plan.samples,
        train_iters=plan.steps,
        eval_interval=settings.evaluation.eval_interval,
        eval_iters=settings.evaluation.eval_iters,
        global_batch_size=plan.sizes.largest,
        full_validation=settings.evaluation.full_validation,
    )
    return [wanted.train, wanted.valid, wanted.test]


def _made(provider: ModelProvider, part: Part) -> nn.Module:
    current().part = part
    return provider(pre_process=part.first, post_process=part.last)


def _profiler(settings: Settings, world: World) -> StepProfiler | None:
    flags, folder = settings.watching, settings.logging.tensorboard_dir
    if not flags.profile or world.rank not in flags.profile_ranks:
        return None
    first, end, trace = flags.profile_step_start, flags.profile_step_end, None
    if flags.use_pytorch_profiler and folder is not None:
        # As TensorBoard's plugin wants it named.
        trace = folder / f"rank-{world.rank:05d}.steps-{first + 1}-{end}.pt.trace.json.gz"
    return StepProfiler(first, end, trace)


def _checkpointer(settings: Settings) -> Checkpointer | None:
    flags = settings.checkpointing
    if flags.save is None:
        print_rank_0("no --save: nothing is saved, and a run that is killed begins again")
        return None
    if flags.save_interval is None:
        print_rank_0(
            "no --save-interval: steps are kept in memory, and on storage at the end, at a drain or a signal only"
        )
    return Checkpointer(flags.save, persist_every=flags.save_interval, keep=flags.keep)


def _make_folder(flags: CheckpointFlags) -> None:
    """Before minutes are spent on what could not be saved."""
    if flags.folder is not None:
        with _writing(flags):
            flags.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(flags.folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _writing(flags: CheckpointFlags) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"--save {flags.save} cannot be written to: {error.strerror}; give another folder"
        ) from error


def _start(
    settings: Settings,
    config: GPTConfig,
    checkpoint: Checkpointer | None,
    state: states.State,
    device: torch.device,
    others: Mapping[str, Any],
    *,
    exact: bool,
) -> int:
    """Set the weights, and all else of `state`; returns the number of steps that are finished already.

    others: of the data that are not trained on.
    """
    flags, model = settings.checkpointing, settings.model
    conditions = {name: one if exact else None for name, one in state["conditions"].items()}
    states.agree({**state["identity"], **conditions, **others, **settings.common()}, device)
    start = 0
    if checkpoint is not None:
        start = states.resume(checkpoint, state, flags, exact=exact)
    if start == 0:  # else they are there already, and drawing them takes longer than a restore
        initialize(state["model"], config, model.seed, model.init_method_std)
    if start == 0 and flags.load is not None:
        start, note = states.begin(state, flags)
        if note:
            print_rank_0(note)
    return start


def _reporter(
    settings: Settings,
    plan: Plan,
    config: GPTConfig,
    world: World,
    clock: phases.Clock,
    start: int,
) -> Reporter:
    flags, watching = settings.logging, settings.watching
    return Reporter(
        flags, iterations=plan.steps, seq_length=config.seq_length, flops=flops.per_token(config),
        devices=world.size, peak=reporter.peak(watching, world.device), mfu=watching.log_mfu,
        sinks=reporter.sinks(
            flags, iteration=start, consumed=plan.consumed(start),
            save=settings.checkpointing.folder,
        ),
        metrics=reporter.metrics(watching), device=world.device, clock=clock,
    )  # fmt: skip


def _checked(
    found: Any, settings: Settings, plan: Plan
) -> tuple[Dataset | None, Sequence[Dataset], Dataset | None]:
    """What the script's function gives to train on, validation sets and a test set, as far as the run evaluates
    on them. UsageError where the run would miss something of it, be it days from now."""
    if not isinstance(found, Sequence) or len(found) != len(NAMES):
        raise UsageError(
            f"train_valid_test_dataset_provider is to return {', '.join(NAMES)}: three, or None for each"
        )
    train, valid, test = found
    sets = () if valid is None else valid if isinstance(valid, Sequence) else (valid,)
    if not settings.evaluation.eval_iters:
        test = None
        sets = sets if settings.evaluation.full_validation else ()
    if not settings.evaluation.skip_train:
        if train is None:
            raise UsageError(
                "there is nothing to train on: give --data-path or --train-data-path, or --skip-train"
            )
        if len(train) < plan.samples:
            raise UsageError(
                f"the run trains on {plan.samples} samples, and the data have {len(train)}: make it shorter, "
                "or have the script's dataset repeat its own"
            )
    for name, one in (*(("validation", one) for one in sets), ("test", test)):
        if one is not None and not len(one):
            raise UsageError(f"there are {name} data without any sample: leave them out")
    return train, sets, test


def _digest(data: Dataset | None) -> str:
    """What is the same where samples and their order are."""
    return "" if data is None else str(getattr(data, "digest", len(data)))

"""`pretrain`: what a training script calls, under Megatron's name and with Megatron's parameters.

from elastic.trainer.pretrain import get_args, pretrain, print_rank_0

if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
"""

import contextlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic import session
from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.arguments.namespace import shown
from elastic.trainer.arguments.parse import Provider, parse
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.current import current, reading
from elastic.trainer.data import tokenizers
from elastic.trainer.parallel import kernels
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.parallel.program import ForwardStep
from elastic.trainer.run import begin, mistakes, rehearsal
from elastic.trainer.run.begin import ModelProvider
from elastic.trainer.run.loop import Loop, Run
from elastic.trainer.run.non_loss import NonLoss
from elastic.trainer.run.step import Stepper
from elastic.trainer.watch import made, memory, phases
from elastic.trainer.watch.reporter import say
from elastic.trainer.watch.timers import Timers
from elastic.trainer.world import World, joined

Datasets = Callable[[Sequence[Any]], tuple[Any, Any, Any]]
"""From numbers of samples to train, validation and test; None for what there is not. With --full-validation
the number of validation is None: all that there are."""
EmbeddingRanks = Callable[[list[int]], Sequence[int]] | None
"""Of a pipeline's ranks, those that have an embedding."""


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
        writes = settings.logging.tensorboard_dir is not None
        non_loss = NonLoss(
            process=process_non_loss_data_func if writes else None,
            of_model=non_loss_data_func,
            step=forward_step_func,
        )
        non_loss.check(settings.parallel().pp)
        rehearsal.announce(settings)
        asked = (get_embedding_ranks, get_position_embedding_ranks)
        _pretrain(settings, train_valid_test_dataset_provider, model_provider, non_loss, asked)
    except (UsageError, CheckpointError) as error:
        mistakes.tell(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None  # whoever pressed ^C knows
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        raise SystemExit(memory.end(made.out_of_memory(error, settings))) from None


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


def check_embeddings(words: EmbeddingRanks, positions: EmbeddingRanks) -> None:
    """Raises `UsageError` where a pipeline's ranks 0, 1, ... are to have embeddings otherwise than in this run."""
    run = current()
    ranks = list(range(run.settings.parallel().pp))
    first, ends = {ranks[0]}, {ranks[0], ranks[-1]}
    # The last one has a head of its own where it is not tied; scripts count that, or do not.
    of_words = (ends,) if run.config.tied else (first, ends)
    for name, function, ours in (
        ("get_embedding_ranks", words, of_words),
        ("get_position_embedding_ranks", positions, (first,)),
    ):
        if function is not None and set(found := function(ranks)) not in ours:
            raise UsageError(
                f"{name}: of pipeline ranks {ranks} it wants {list(found)} to have an embedding, and here "
                f"{sorted(ours[0])} have: leave it out"
            )


def _pretrain(
    settings: Settings,
    datasets: Datasets,
    provider: ModelProvider,
    non_loss: NonLoss,
    embeddings: tuple[EmbeddingRanks, EmbeddingRanks],
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
        begin.introduce(settings, world_size=world.size, rank=world.rank)
        check_embeddings(*embeddings)
        multiple = settings.tokenizer.make_vocab_size_divisible_by
        print_rank_0(tokenizers.padding_line(current().tokenizer.vocab_size, multiple))
        with contextlib.ExitStack() as stack:
            watching = settings.watching
            if watching.record_memory_history:
                stack.enter_context(memory.recorded(watching.memory_snapshot_path, world.rank))
            _run(settings, layout, world, datasets, provider, non_loss)


def _run(
    settings: Settings,
    layout: Layout,
    world: World,
    datasets: Datasets,
    provider: ModelProvider,
    non_loss: NonLoss,
) -> None:
    config = current().config
    plan, profiler = begin.plan_of(settings, layout), made.profiler(settings, world)
    looked_at = made.probe_set(settings, config, current().tokenizer)
    if world.is_first:
        begin.make_folder(settings.checkpointing)
    data = begin.checked(datasets(begin.samples(settings, plan)), settings, plan)
    _tell(current().args, data)
    clock = phases.clock(
        settings.watching.trace_phases, world.rank, cuda=world.device.type == "cuda"
    )
    laid = begin.model(plan, layout, provider, non_loss.forward_step, world.device, clock)
    rehearsal.settle(laid)
    print_rank_0(f"number of parameters: {config.parameter_count}")
    print_rank_0(made.footprint_line(config, layout, laid, plan))
    adam, scale = begin.optimizer(settings, laid), begin.loss_scale(settings)
    state = begin.state_of(settings, plan, config, laid, adam, scale, data.train)
    checkpoint = begin.checkpointer(settings)
    begin.agree(settings, state, data, 0 if looked_at is None else len(looked_at), world.device)
    start, notes = begin.start(settings, plan, config, checkpoint, state)
    replicas, said = begin.replicas(settings, laid, adam, checkpoint)
    for note in (*notes, *said):
        print_rank_0(note)
    told = progress = None
    if world.is_first:
        told = made.reporter(settings, plan, config, world, clock, start, shown(current().args))
        progress = made.progress(settings, plan, config, world, start)
        for note in begin.keep_tokenizer(settings.checkpointing, current().tokenizer, start):
            print_rank_0(note)
    run = Run(
        settings=settings, plan=plan, laid=laid,
        stepper=Stepper(
            laid, leaf_tokens=plan.leaf_size * config.seq_length, names=state["reports"]
        ),
        optimizer=adam, loss_scale=scale, state=state,
        train=data.train, validation=data.validation, test=data.test,
        checkpoint=checkpoint, replicas=replicas, reporter=told, clock=clock, timers=current().timers,
        profiler=profiler, probes=looked_at, non_loss=non_loss, progress=progress,
    )  # fmt: skip
    _go(run, start)
    current().laid = None  # which goes before the process group does


def _tell(args: Any, data: begin.Data) -> None:
    """A script that asks what is done with it."""
    args.do_train, args.do_valid = data.train is not None, bool(data.validation)
    args.do_test = data.test is not None


def _go(run: Run, start: int) -> None:
    """Train, and evaluate at the end; start: finished steps."""
    args, only_look = current().args, run.settings.evaluation.skip_train
    args.iteration = args.curr_iteration = start
    args.consumed_train_samples = run.plan.consumed(start)
    loop = Loop(run)
    with reading(run.train):
        finished = start if only_look else loop.train(start)
    done = finished >= run.plan.steps or only_look  # more, where it was made shorter
    if done and (args.do_valid or args.do_test):
        with run.clock.paused():
            loop.evaluate(finished, final=True)
    if run.reporter is not None:
        run.reporter.close()
    run.clock.close()
    if run.checkpoint is not None:
        run.checkpoint.close()

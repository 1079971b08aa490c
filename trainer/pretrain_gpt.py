"""Train a GPT: `torchrun ... -m elastic.trainer.pretrain_gpt --data-dir D --save D ...`.

Data parallel: each rank has the whole model and a part of the global batch. Every step is saved into
memory. Killed at any point and started again, with as many ranks or others, a run goes on from the
newest with the samples and the learning rates that it would have had.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elastic import session
from elastic.checkpoint import Checkpointer
from elastic.proto.errors import UsageError
from elastic.trainer import optimizer
from elastic.trainer.data import tokenizer
from elastic.trainer.data.batches import Batches, TokenFile
from elastic.trainer.data.prepare import prepare
from elastic.trainer.generate import continue_text
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.settings import Settings, parse
from elastic.trainer.world import World, joined


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run works with from its start to its end."""

    settings: Settings
    """What it was told."""
    world: World
    """Who trains."""
    batches: Batches
    """What is trained on."""
    model: GPT
    """The weights, on this rank's device."""
    optimizer: torch.optim.AdamW
    """Its state covers `model`'s parameters."""
    identity: Mapping[str, Any]
    """What a run must be again for its checkpoints to fit: model shape, seed, batch, corpus."""


def build(settings: Settings, world: World, token_file: TokenFile) -> Run:
    """Make the model with its first weights, its optimizer and its data."""
    shape = settings.model(token_file.vocab_size)
    model = GPT(shape)
    initialize(model, shape, settings.seed, settings.init_method_std)
    model.to(world.device)
    fixed = {
        "seed": settings.seed,
        "global_batch_size": settings.global_batch_size,
        "tokens": token_file.digest,
    }
    return Run(
        settings=settings,
        world=world,
        batches=Batches(
            tokens=token_file.tokens(),
            seed=settings.seed,
            global_batch_size=settings.global_batch_size,
            seq_length=settings.seq_length,
        ),
        model=model,
        optimizer=optimizer.build(
            model,
            weight_decay=settings.weight_decay,
            betas=(settings.adam_beta1, settings.adam_beta2),
        ),
        identity=asdict(shape) | fixed,
    )


def resume(run: Run, checkpoint: Checkpointer, state: dict[str, Any]) -> int:
    """Load the newest checkpoint into `state`; returns the number of finished steps, 0 without one.

    Raises UsageError when the checkpoint is of a run with another model, seed, batch or corpus: it
    could not go on as it was.
    """
    found: dict[str, Any] = {"identity": None}
    step = checkpoint.load(found)
    if step == 0:
        return 0
    for name, mine in run.identity.items():
        if found["identity"].get(name) != mine:
            raise UsageError(
                f"step {step} in {run.settings.save} has {name} {found['identity'].get(name)}, not "
                f"{mine}: give the same value or another --save"
            )
    return checkpoint.load(state, step=step)


def train_step(run: Run, parallel: nn.Module, step: int) -> Tensor:
    """One optimizer step; returns this rank's part of the global batch's mean loss, a scalar.

    `step` counts from 0. The parts of all ranks add up to the mean, in nats a token, and so do
    their gradients: every token weighs the same, however unevenly the samples were shared out.
    """
    settings, world = run.settings, run.world
    samples = run.batches.local(step, world.rank, world.size).to(world.device)  # [b, S + 1]
    inputs, targets = samples[:, :-1], samples[:, 1:]
    share = 1 / (settings.global_batch_size * settings.seq_length)
    part: Tensor = parallel(inputs, targets, torch.full(targets.shape, share, device=world.device))[
        0
    ]
    # DDP divides the sum of the gradients by the world's size.
    torch.autograd.backward(part * world.size)
    nn.utils.clip_grad_norm_(run.model.parameters(), settings.clip_grad)
    optimizer.set_lr(run.optimizer, settings.schedule.at(step))
    run.optimizer.step()
    run.optimizer.zero_grad()
    return part.detach()


def train(run: Run, checkpoint: Checkpointer) -> None:
    """Train from the newest checkpoint to the last step, saving each and reporting as told."""
    settings, world = run.settings, run.world
    parallel = DistributedDataParallel(run.model, gradient_as_bucket_view=True)
    state = {"identity": dict(run.identity), "model": parallel, "optimizer": run.optimizer}
    start = resume(run, checkpoint, state)
    say(world, f"resumed from step {start}" if start else "starting from step 0")
    marked_step, marked_at = start, time.perf_counter()
    for step in range(start, settings.steps):
        loss = train_step(run, parallel, step)
        finished = step + 1
        checkpoint.save(finished, state)
        session.step(finished)
        last = finished == settings.steps
        if last or finished % settings.log_interval == 0:
            dist.all_reduce(loss)
            value = float(loss)  # waits for the device, so that the clock below is honest
            seconds = (time.perf_counter() - marked_at) / (finished - marked_step)
            say(world, progress(settings, world, finished, value, seconds))
            marked_step, marked_at = finished, time.perf_counter()


def progress(settings: Settings, world: World, step: int, loss: float, seconds: float) -> str:
    """The line of `step` finished steps; `seconds` is the time of one step."""
    width = len(str(settings.steps))
    tokens = settings.global_batch_size * settings.seq_length
    return (
        f"step {step:{width}d}/{settings.steps} | loss {loss:.4f} "
        f"| lr {settings.schedule.at(step - 1):.2e} | {seconds * 1e3:.1f} ms "
        f"| {tokens / seconds:.0f} tokens/s | world {world.size}"
    )


def say(world: World, line: str) -> None:
    """Print on rank 0, at once: whoever watches the run reads it through a pipe."""
    if world.is_first:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def keep_tokenizer(data_dir: Path, save: Path) -> None:
    """Put the tokenizer beside the checkpoints, which are of no use without it."""
    save.mkdir(parents=True, exist_ok=True)
    tokenizer.save(tokenizer.load(data_dir), save)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    settings = parse(arguments)
    try:
        _pretrain(settings)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _pretrain(settings: Settings) -> None:
    # Before the ranks join, so that nobody waits inside a collective for who prepares.
    token_file = prepare(
        settings.data_dir, vocab_size=settings.vocab_size, max_bytes=settings.corpus_bytes
    )
    with (
        joined() as world,
        Checkpointer(settings.save, persist_every=settings.save_interval) as checkpoint,
    ):
        run = build(settings, world, token_file)
        if world.is_first:
            keep_tokenizer(settings.data_dir, settings.save)
        train(run, checkpoint)
    if world.is_first:
        words = tokenizer.load(settings.data_dir)
        text = continue_text(run.model, words, "def ", max_new_tokens=64)
        say(world, f"sample:\n{text}")


if __name__ == "__main__":
    sys.exit(main())

"""The steps of a run, from where it goes on to its end."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from elastic import session
from elastic.checkpoint import Checkpointer
from elastic.trainer import current
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.data.items import Dataset
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.run import garbage
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run import state as states
from elastic.trainer.run.deadline import Deadline
from elastic.trainer.run.due import due
from elastic.trainer.run.evaluating import evaluate, probe
from elastic.trainer.run.feed import Feed
from elastic.trainer.run.loss_scale import LossScale
from elastic.trainer.run.non_loss import NonLoss
from elastic.trainer.run.plan import Plan
from elastic.trainer.run.replicas import Replicas
from elastic.trainer.run.state import State
from elastic.trainer.run.step import Stepper
from elastic.trainer.run.told import Coming, Numbers, Taken
from elastic.trainer.run.totals import num_zeros, params_norm
from elastic.trainer.transfers import ToHost
from elastic.trainer.watch import evaluation, guard
from elastic.trainer.watch.evaluation import Reading
from elastic.trainer.watch.phases import Clock
from elastic.trainer.watch.probes import ProbeSet
from elastic.trainer.watch.profiler import StepProfiler
from elastic.trainer.watch.progress import Progress
from elastic.trainer.watch.report import Step
from elastic.trainer.watch.reporter import Reporter, say
from elastic.trainer.watch.timers import Timers


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a run works with from its start to its end."""

    settings: Settings
    plan: Plan
    laid: Laid
    stepper: Stepper
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    """Of fp16."""
    state: State
    """What is saved, and loaded."""
    train: Dataset | None
    validation: Sequence[Dataset]
    test: Dataset | None
    checkpoint: Checkpointer | None
    """None without --save."""
    replicas: Replicas | None
    """What compares them."""
    reporter: Reporter | None
    """On rank 0."""
    probes: ProbeSet | None
    progress: Progress | None
    """With --log-progress, on rank 0."""
    non_loss: NonLoss
    """What a script looks at beside the loss."""
    profiler: StepProfiler | None
    """On ranks that are profiled."""
    clock: Clock
    timers: Timers


class Loop:
    """Runs it; what changes from step to step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        schedules = run.settings.schedules
        self._rate, self._decay = schedules.learning_rate(), schedules.decay_of_weights()
        self._set_guard(guard.begun(guard.from_json(run.state["guard"]), run.settings.guard))
        self._numbers = Numbers(
            run.settings, run.plan, run.reporter, run.timers, saves=run.checkpoint is not None
        )
        minutes = run.settings.checkpointing.exit_duration_in_mins
        ends = None if minutes is None else run.state["job"]["began"] / 1000 + minutes * 60
        self._deadline = None if ends is None else Deadline(ends, run.laid.device)
        self._settled = 0
        """The last step that was saved, where anything is; a run that has gone back further computes it again."""

    def train(self, start: int) -> int:
        """The steps after the first `start`; returns how many are finished then."""
        run, step = self._run, start
        self._settled = start
        ends = start >= run.plan.steps or run.state["job"].get("ends", False)
        try:
            with garbage.collected() as collect:
                while not ends:
                    self._compare(step)
                    feed = self._feed(step)
                    try:
                        step, ends = self._until_rollback(feed, step, collect)
                    finally:
                        feed.close()
            if run.profiler is not None:
                with run.clock.paused():
                    run.profiler.close()
            self._numbers.end(step)
        finally:
            if run.reporter is not None:
                run.reporter.flush()
        with run.clock.paused():
            self._compare(step)
            if run.checkpoint is not None and step > start:
                self._save(run.checkpoint, step, persist=True)
                run.checkpoint.wait()
        return step

    def evaluate(self, step: int, *, final: bool = False) -> None:
        """On each validation set, and at the end on the test set; `step`: finished ones."""
        run = self._run
        names = evaluation.suffixes(len(run.validation), run.settings.data.validation_set_names)
        sets = [
            ("validation", suffix, one) for suffix, one in zip(names, run.validation, strict=True)
        ]
        if final and run.test is not None:
            sets.append(("test", "", run.test))
        with session.in_phase("evaluate"):
            for kind, suffix, dataset in sets:
                reading = self._reading(kind, len(dataset), step, final=final)
                leaves = run.plan.cut(run.plan.sizes.largest)
                with current.reading(dataset):
                    losses = evaluate(
                        run.stepper, run.laid, dataset, reading, leaves,
                        workers=run.settings.data.num_workers,
                    )  # fmt: skip
                    found = run.non_loss.collected(run.laid, dataset, reading, leaves)
                if run.reporter is not None:
                    consumed = run.plan.consumed(step)
                    run.reporter.evaluation(losses, step, consumed, kind=kind, suffix=suffix)
                writer = None if run.reporter is None else run.reporter.writer
                run.non_loss.tell(found, step, writer)

    def probe(self, step: int, probes: ProbeSet) -> None:
        """Look at them; `step`: finished ones."""
        run = self._run
        with session.in_phase("evaluate"):
            found = probe(run.stepper, run.laid, probes, run.plan.cut(len(probes)))
        if run.reporter is not None:
            run.reporter.probes(found, step, run.plan.consumed(step))

    # --- steps ------------------------------------------------------------------------------

    def _until_rollback(
        self, feed: Feed, step: int, collect: Callable[[int], None]
    ) -> tuple[int, bool]:
        """Steps with what `feed` gives; returns those that are finished and whether the run ends."""
        run = self._run
        if run.reporter is not None:
            run.reporter.begin()
        while step < run.plan.steps:
            if run.profiler is not None:
                run.profiler.step(step)
            run.clock.begin(step + 1)
            self._step(feed, step)
            step += 1
            state, verdict = self._numbers.judged(self._guard)
            self._set_guard(state)
            if verdict is not None and verdict.action == "rollback":
                with run.clock.paused():
                    return self._go_back(verdict), False
            with run.clock.inside("log"):
                if self._numbers.due(step):
                    self._line(step)
                else:
                    self._numbers.tell()
            if self._evaluation_due(step):
                with self._paused():
                    self.evaluate(step)
            if run.probes is not None and step % run.settings.watching.probe_interval == 0:
                with self._paused():
                    self.probe(step, run.probes)
            if run.replicas is not None and run.replicas.due(step):
                with self._paused():
                    self._compare(step)
            # Last: ranks may leave in it, and from it nothing above is done again.
            ends = self._settle(step)
            session.step(step)
            collect(step)
            if ends:
                return step, True
        return step, True

    def _step(self, feed: Feed, step: int) -> None:
        run, consumed, leaves = (
            self._run,
            self._run.plan.consumed(step),
            self._run.plan.leaves(step),
        )
        args = current.current().args  # of a team's script, which may look while the step runs
        args.curr_iteration, args.consumed_train_samples = step, consumed
        scale = 1.0 if run.loss_scale is None else run.loss_scale.value
        with run.clock.inside("data"):
            share = next(feed)
        forward_backward = run.timers("forward-backward", log_level=1)
        forward_backward.start()
        sums = run.stepper.accumulate(share, leaves, loss_scale=scale)
        forward_backward.stop()
        with run.clock.inside("clip"):
            clip = run.settings.optimizer.clip_grad
            norm = run.stepper.clip(sums, leaves, clip, loss_scale=scale)
            zeros = num_zeros(run.laid) if run.settings.logging.log_num_zeros_in_grad else None
            coming = Coming(sums, norm, zeros)
            fine = run.loss_scale is None or run.loss_scale.update(norm)
        rate = self._rate.at(consumed)
        timer = run.timers("optimizer", log_level=1)
        timer.start()
        with run.clock.inside("optimizer"):
            if fine:
                optimizers.set_rates(run.optimizer, rate, self._decay.at(consumed))
                run.optimizer.step()
            run.optimizer.zero_grad()
        timer.stop()
        told = Step(
            iteration=step + 1,
            consumed=consumed + leaves.batch_size,
            batch_size=leaves.batch_size,
            learning_rate=rate,
            losses={},
            loss_scale=scale,
            world_size=run.laid.grid.size,
            skipped=not fine,
            skipped_samples=self._guard.skips.before(consumed),
        )
        args.consumed_train_samples = told.consumed
        of_params = ToHost(params_norm(run.laid)) if run.settings.logging.log_params_norm else None
        stuck = 0 if run.loss_scale is None else run.loss_scale.stuck
        self._numbers.take(Taken(told, coming, of_params, stuck))

    def _line(self, step: int) -> None:
        """Behind it all ranks know of reports that came later than the first step's: they are told from then on."""
        run = self._run
        self._numbers.line(step)
        if self._numbers.unnamed():
            names = run.stepper.agree()
            if run.reporter is not None and names:
                say(f" reported later than the rest, and told from here on: {', '.join(names)}")

    def _settle(self, step: int) -> bool:
        """Save it, if it may be; returns whether the run ends behind it, which ranks of this job that begin again from it
        find in it."""
        run, flags = self._run, self._run.settings.checkpointing
        over = self._deadline is not None and self._deadline.passed()
        found = due(step, self._settled, flags, holds=self._guard.holds, over=over)
        if not found.settle:
            return False
        self._settled = step
        if run.checkpoint is None:
            return found.end
        run.state["job"]["ends"] = found.end
        timer = run.timers("save-checkpoint", log_level=1)
        timer.start()
        with run.clock.inside("save"):
            self._save(run.checkpoint, step, persist=found.persist)
        timer.stop()
        if run.progress is not None and found.persist:
            tokens = run.plan.consumed(step) * run.settings.schedules.seq_length
            run.progress.saved(step, tokens)
        return found.end

    def _save(self, checkpoint: Checkpointer, step: int, *, persist: bool) -> None:
        # Else a run that goes on would tell of others from there on, and its guard might look at another loss.
        self._run.state["reports"] = self._run.stepper.names
        checkpoint.save(step, self._run.state, persist=persist)

    def _compare(self, step: int) -> None:
        """Replicas with one another; step: finished ones. Raises UsageError where they differ."""
        replicas = self._run.replicas
        if replicas is not None and replicas.check(step) and self._run.reporter is not None:
            say(f">>> Weight hashes match after {step} iterations...")

    def _feed(self, start: int) -> Feed:
        """What steps from `start` on train on."""
        run, skips = self._run, self._guard.skips
        assert run.train is not None
        batches = (
            run.plan.of(step, skips, run.laid.place.dp, run.laid.grid.dp)
            for step in range(start, run.plan.steps)
        )
        workers = run.settings.data.num_workers
        return Feed(run.train, batches, device=run.laid.device, workers=workers)

    # --- back -------------------------------------------------------------------------------

    def _set_guard(self, state: guard.State) -> None:
        self._guard = state
        self._run.state["guard"] = guard.to_json(state)

    def _go_back(self, verdict: guard.Verdict) -> int:
        """To the newest checkpoint; returns the steps that are finished in it. What was to be saved of a step is
        not saved again: a checkpoint's steps only grow, and it is only computed again."""
        run, step = self._run, 0
        if run.checkpoint is not None and verdict.restore:
            step = states.load(run.checkpoint, run.state)
        if not 0 < step <= (verdict.restore or 0):  # a run that ended in an odd step has saved it
            verdict = guard.nowhere(verdict)
        else:
            if run.replicas is not None:
                run.replicas.forget()
            if run.loss_scale is not None:
                run.loss_scale.stuck = 0
            self._numbers.back(step, run.plan.consumed(step))
            verdict = replace(verdict, restore=step)
        self._numbers.say(verdict)
        saved = guard.from_json(run.state["guard"])
        self._set_guard(guard.gone_back(saved, self._guard, verdict, run.settings.guard))
        return step

    # --- evaluation, and the end ------------------------------------------------------------

    def _evaluation_due(self, step: int) -> bool:
        due = step % self._run.settings.evaluation.eval_interval == 0
        return bool(self._run.validation) and due and step < self._run.plan.steps

    def _reading(self, kind: str, length: int, step: int, *, final: bool) -> Reading:
        """What an evaluation reads of a set."""
        flags, size = self._run.settings.evaluation, self._run.plan.sizes.largest
        if kind == "test":
            return evaluation.test(iters=flags.eval_iters, batch_size=size, length=length)
        if flags.full_validation:
            return evaluation.whole(length)
        return evaluation.validation(
            step, interval=flags.eval_interval, iters=flags.eval_iters, batch_size=size,
            length=length, final=final,
        )  # fmt: skip

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """What is done in it is no step."""
        self._numbers.tell(wait=True)
        reporter = self._run.reporter
        if reporter is not None:
            reporter.pause()
        with self._run.clock.paused():
            yield
        if reporter is not None:
            reporter.begin()

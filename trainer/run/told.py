"""What is made of the numbers of steps: they are checked, judged, and handed to who tells of them.

They come from the device behind what it has to do. Who is told need not wait for them, and is told of a step
when they are there: in the step itself where it is judged or saved, else about a step later.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.run.plan import Plan
from elastic.trainer.run.step import Sums
from elastic.trainer.transfers import ToHost
from elastic.trainer.watch import guard
from elastic.trainer.watch.report import Step
from elastic.trainer.watch.reporter import Reporter
from elastic.trainer.watch.timers import Timers

OF_SOURCE = "lm loss "
"""What the names of reports begin with that are of one data source."""
MOST_STUCK = 10
"""Steps in a row that may overflow with a loss scale that cannot fall: a few odd batches pass, and others give up at
the first."""
TIMED = ("forward-backward", "batch-generator", "optimizer", "save-checkpoint")
"""Timers that are told, all of them Megatron's; the second one is scripts'."""


class Coming:
    """Numbers of one step, on their way from the device."""

    def __init__(self, sums: Sums, norm: Tensor, num_zeros: Tensor | None) -> None:
        """norm: of the gradient, []. Make it before the device gets the optimizer's step to do."""
        self.names = tuple(sums.totals)
        """Of all reports, also of those that no leaf of this step has."""
        self._sent = ToHost(
            torch.cat(
                [
                    torch.stack([norm.double(), sums.tokens, sums.unnamed]),
                    *sums.totals.values(),
                ]
            )
        )
        self._num_zeros = None if num_zeros is None else ToHost(num_zeros)

    @property
    def there(self) -> bool:
        return self._sent.there and (self._num_zeros is None or self._num_zeros.there)

    @property
    def norm(self) -> float:
        return float(self._sent.read()[0])

    @property
    def tokens(self) -> float:
        """That count."""
        return float(self._sent.read()[1])

    @property
    def unnamed(self) -> bool:
        """Whether the loss function reported what is not among its means."""
        return bool(self._sent.read()[2])

    @property
    def num_zeros(self) -> int | None:
        return None if self._num_zeros is None else round(float(self._num_zeros.read()))

    def means(self) -> dict[str, float]:
        """What the loss function reports, by name, in fp32's precision; without what is of nothing, such as a report
        that no leaf of the step has. Where no token counts all is of nothing, and no number."""
        parts = self._sent.read()[3:].view(-1, 2)
        told = parts.any(dim=1) | (self.tokens == 0)
        means = (parts[:, 0] / parts[:, 1]).float()
        found = zip(self.names, means.tolist(), told.tolist(), strict=True)
        return {name: mean for name, mean, is_told in found if is_told}


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that nobody was told of yet."""

    step: Step
    """Without what follows."""
    coming: Coming
    params_norm: ToHost | None
    """Known only behind the optimizer's step."""
    stuck: int = 0
    """`LossScale.stuck` after it."""

    @property
    def finite(self) -> bool:
        """Whether training can go on behind it; waits for the device. A scaled gradient that overflows is only left out,
        but not where the loss is not finite either, nor again and again with the least scale."""
        if not self.step.skipped:
            return math.isfinite(self.coming.norm)
        loss = self.coming.means().get(_watched(self.coming.names) or "", 0.0)
        return math.isfinite(loss) and self.stuck < MOST_STUCK

    @property
    def there(self) -> bool:
        """Whether `whole` does not wait."""
        return self.coming.there and (self.params_norm is None or self.params_norm.there)

    def whole(self) -> Step:
        means, norm = self.coming.means(), self.params_norm
        return replace(
            self.step,
            losses=_losses(means),
            sources={
                name.removeprefix(OF_SOURCE): loss
                for name, loss in means.items()
                if name.startswith(OF_SOURCE) and not math.isnan(loss)  # else no tokens of it
            },
            grad_norm=self.coming.norm,
            params_norm=None if norm is None else float(norm.read()),
            num_zeros=self.coming.num_zeros,
        )


class Numbers:
    """Those of one life of a run, step by step; all ranks have the same, and come to the same."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        reporter: Reporter | None,
        timers: Timers,
        *,
        saves: bool,
    ) -> None:
        """saves: what is saved of a step may be all that is left of the run, so each is looked at before."""
        self._settings, self._plan, self._reporter = settings, plan, reporter
        self._timers, self._saves = timers, saves
        self._taken: deque[Taken] = deque()
        self._odd: Taken | None = None
        """The first that is not finite."""
        self._ran = 0
        """Steps since the last line, those that were taken back, too."""
        self._unnamed = False

    def take(self, taken: Taken) -> None:
        """The next step's."""
        self._taken.append(taken)
        self._ran += 1

    def judged(self, state: guard.State) -> tuple[guard.State, guard.Verdict | None]:
        """The guard's state after the last step, and its verdict on it, which is told but for a rollback's. Raises
        UsageError where the run is to stop."""
        flags, last = self._settings.guard, self._taken[-1]
        if self._saves and flags.guard != "rollback" and not last.finite:
            raise _not_finite(last)
        if flags.guard == "off":
            return state, None
        skips, step = self._plan.line(state.skips), last.step
        before = step.consumed - step.batch_size
        name, means = watched(last.coming.names, "--guard"), last.coming.means()
        left_out = step.skipped and last.finite
        seen = guard.Seen(
            iteration=step.iteration,
            places=(skips.place(before), skips.place(step.consumed - 1) + 1),
            loss=means.get(name, math.nan),
            grad_norm=last.coming.norm,
            idle=left_out or not last.coming.tokens or name not in means,
        )
        state, verdict = guard.judge(state, seen, flags)
        if verdict is not None and verdict.action != "rollback":
            self.tell()
            self.say(verdict)
        return state, verdict

    def say(self, verdict: guard.Verdict) -> None:
        """Tell of it. Raises UsageError where the run is to stop."""
        if self._reporter is not None:
            self._reporter.verdict(verdict)
        if verdict.action == "stop":
            raise UsageError(str(verdict))

    def tell(self, *, wait: bool = False) -> None:
        """Hand over the steps whose numbers are there; wait: until they are."""
        while self._taken and (wait or self._taken[0].there):
            self._hand_over(self._taken.popleft())

    def due(self, iteration: int) -> bool:
        """Whether a line is."""
        return iteration % self._settings.logging.log_interval == 0 or iteration == self._plan.steps

    def line(self, iteration: int) -> None:
        """Tell of all steps up to it, and a line of those since the last one. Raises UsageError where one was not
        finite."""
        self.tell(wait=True)
        if self._odd is not None and self._settings.guard.guard != "rollback":
            raise _not_finite(self._odd)
        if self._reporter is not None:
            self._reporter.line()
        flags = self._settings.logging
        if flags.log_timers_to_tensorboard:
            times = self._timers.slowest(TIMED, self._ran, reset=False)
            if self._reporter is not None:
                self._reporter.timers(times, iteration)
        if flags.timing_log_level > 0:
            self._timers.log(TIMED, normalizer=self._ran)
        self._ran = 0

    def unnamed(self) -> bool:
        """Behind a line: whether steps since this was asked have reports that the ranks have not agreed on; the same on
        all ranks."""
        found, self._unnamed = self._unnamed, False
        return found

    def back(self, iteration: int, consumed: int) -> None:
        """The run has gone back there: what came later comes again."""
        while self._taken:
            taken = self._taken.popleft()
            if taken.step.iteration <= iteration:
                self._hand_over(taken)
        self._unnamed = False  # which ranks may have seen of different steps
        if self._reporter is not None:
            self._reporter.back(iteration, consumed)

    def end(self, iteration: int) -> None:
        """No step comes any more: a line of what none has told. Raises UsageError as `line` does."""
        if self._ran:
            self.line(iteration)

    def _hand_over(self, taken: Taken) -> None:
        self._unnamed |= taken.coming.unnamed
        if self._odd is None and not taken.finite:
            self._odd = taken
        if self._reporter is not None:
            self._reporter.step(taken.whole())


def watched(names: Iterable[str], flag: str) -> str:
    """Of reports the loss that `flag` looks at. UsageError where the run's loss function reports none."""
    name = _watched(names)
    if name is None:
        raise UsageError(
            f"{flag} looks at a loss, and the loss function reports none: leave {flag} out"
        )
    return name


def _watched(names: Iterable[str]) -> str | None:
    losses = [name for name in names if not name.startswith(OF_SOURCE)]
    return "lm loss" if "lm loss" in losses else next(iter(losses), None)


def _losses(means: Mapping[str, float]) -> dict[str, float]:
    """Those that are not of one source."""
    return {name: loss for name, loss in means.items() if not name.startswith(OF_SOURCE)}


def _not_finite(taken: Taken) -> UsageError:
    """As Megatron ends."""
    step = taken.whole()
    losses = ", ".join(f"{name} {loss:.6g}" for name, loss in step.losses.items())
    if taken.stuck >= MOST_STUCK:
        return UsageError(
            f"iteration {step.iteration}: gradients have overflowed in {taken.stuck} steps in a row ({losses}) with the "
            f"loss scale {step.loss_scale:g}, which cannot fall: stopping; lower --min-loss-scale (or --loss-scale) or "
            "--lr, or train with --bf16"
        )
    if step.skipped:
        return UsageError(
            f"iteration {step.iteration}: the loss is not finite ({losses}), whatever it is scaled by: stopping; begin "
            "from an earlier checkpoint (--load, --ckpt-step and a new --save) with a lower --lr, or let --guard "
            "rollback leave such samples out"
        )
    return UsageError(
        f"iteration {step.iteration}: the gradient is not finite ({losses}), so the weights are of no "
        "use from there on: stopping; begin from an earlier checkpoint (--load, --ckpt-step and a new "
        "--save) with a lower --lr, or let --guard rollback leave such samples out; where the loss "
        "is finite and a script's own, it may be of another mask than `loss_mask`"
    )

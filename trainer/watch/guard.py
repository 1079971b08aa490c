"""Whether a step went wrong: spikes and sudden falls of the loss, odd gradient norms, NaN. Pure.

Every rank judges the same numbers with the same state, so all come to the same verdict without a word
between them. The state goes into the checkpoint with the rest.

A step is compared with where the line of the window before it leads, by medians, so that slow drifts
are followed and outliers among them do not matter. All finite steps enter the window, so a lasting change
is accepted in time; a run that goes back forgets the steps that it takes back.

**Going back.** From the first step out of bounds on nothing is saved (`State.holds`), so that the newest
checkpoint is the last good step, or an older one where there was no memory for that. The run restores it,
and leaves out the samples of the bad steps (`elastic.data.Skips`). Killed in between, it meets the same
numbers again, and does the same.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from elastic.data import Skips
from elastic.trainer.arguments.guard import LEAST, GuardFlags

LOSS_FLOOR = 0.005
"""Deviation of the loss, at least, as a part of it: noise around a flat curve is no spike."""
NORM_FLOOR = 0.1
"""The same of the norm's logarithm."""

_SIGMA = 1.4826  # of a normal distribution, by its median deviation


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One step, as it is judged."""

    iteration: int
    places: tuple[int, int]
    """Its samples in the run's order: first and end, `Skips.place` before and after it."""
    loss: float
    grad_norm: float | None = None
    idle: bool = False
    """There is nothing to judge: a scaled gradient was not finite, so it changed nothing, or no token of it
    counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What is known after a step."""

    losses: tuple[float, ...] = ()
    """Of the window, the newest last."""
    norms: tuple[float, ...] = ()
    """Logarithms, likewise."""
    steps: int = 0
    """That have entered the window since the run began."""
    bad: tuple[int, int] | None = None
    """Of the first of the steps that are out of bounds now: iteration, place."""
    streak: int = 0
    """How many there are, in a row."""
    holds: bool = False
    """The run may have to go back before this step: do not save it."""
    tries: int = 0
    """Rollbacks since all was well for a window."""
    well_at: int = 0
    """Iteration at which they are forgotten."""
    skips: Skips = field(default_factory=Skips)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is wrong with a step, and what to do."""

    iteration: int
    what: Literal["not finite", "spike", "fall"]
    metric: Literal["lm loss", "grad norm"]
    value: float
    bound: float
    """That it is beyond; inf for what is not finite."""
    action: Literal["warn", "rollback", "stop"]
    restore: int | None = None
    """Go back to the newest checkpoint of this iteration or an earlier one; 0: to the beginning. As it is told, that
    which the run has gone back to."""
    skip: tuple[int, int] | None = None
    """Places to leave out from then on."""

    def __str__(self) -> str:
        odd = "not finite"
        if self.what != odd:
            odd = f"{'above' if self.what == 'spike' else 'below'} {self.bound:.6g}"
        said = f"iteration {self.iteration}: {self.metric} {self.value:.6g} is {odd}"
        match self.action, self.skip:
            case "rollback", (first, end):
                return (
                    f"{said}; going back to iteration {self.restore} and leaving out "
                    f"{end - first} samples from {first} on"
                )
            case "stop", _ if self.restore == 0:
                return (
                    f"{said}, and nothing is saved to go back to: stopping; lower --lr or lengthen its "
                    "warm-up, or look at the data"
                )
            case "stop", _:
                return (
                    f"{said}, and going back has not helped: stopping, since the data is not the "
                    "cause; look at the learning rate, or allow more by --guard-rollbacks"
                )
        return said


def begun(loaded: State, flags: GuardFlags) -> State:
    """The state to begin with, from that of a checkpoint, which may be of an odd step, or of a run that only warned. Nobody
    goes back behind what was loaded; and steps that nobody judges are none to compare later ones with."""
    if flags.guard == "off":
        return State(skips=loaded.skips)
    if flags.guard == "warn":
        return replace(loaded, holds=False)
    return replace(loaded, bad=None, streak=0, holds=False)


def judge(state: State, seen: Seen, flags: GuardFlags) -> tuple[State, Verdict | None]:
    """The state after a step, and what is wrong with it, said once for steps in a row."""
    if seen.idle or flags.guard == "off":
        return state, None
    found = _odd(state, seen, flags)
    tries = 0 if seen.iteration >= state.well_at else state.tries
    state = replace(_remembered(state, seen, flags.guard_window), tries=tries)
    if found is None:
        return replace(state, bad=None, streak=0, holds=False), None
    bad = state.bad or (seen.iteration, seen.places[0])
    goes_back = flags.guard == "rollback"
    state = replace(state, bad=bad, streak=state.streak + 1, holds=goes_back)
    if goes_back and (found.what == "not finite" or state.streak >= flags.guard_patience):
        if tries >= flags.guard_rollbacks:
            return state, replace(found, action="stop")
        return state, replace(
            found, action="rollback", restore=bad[0] - 1, skip=(bad[1], seen.places[1])
        )
    return state, found if state.streak == 1 else None


def nowhere(verdict: Verdict) -> Verdict:
    """What becomes of a rollback where nothing is saved."""
    return replace(verdict, action="stop", restore=0, skip=None)


def gone_back(saved: State, state: State, verdict: Verdict, flags: GuardFlags) -> State:
    """The state to go on with, from that of the checkpoint and that of the `verdict`."""
    skips = Skips.of([*saved.skips.ranges, *state.skips.ranges, *filter(None, [verdict.skip])])
    return replace(
        saved,
        skips=skips,
        tries=state.tries + 1,
        well_at=verdict.iteration + flags.guard_window,
        bad=None, streak=0, holds=False,
    )  # fmt: skip


def to_json(state: State) -> dict[str, Any]:
    """For the checkpoint; `from_json` gives the same state back, to the bit."""
    return asdict(state) | {"skips": [list(one) for one in state.skips.ranges]}


def from_json(found: Mapping[str, Any]) -> State:
    """What a later version keeps besides is passed over."""
    known = {one.name for one in fields(State)}
    return State(
        **{
            **{name: value for name, value in found.items() if name in known},
            "losses": tuple(found["losses"]),
            "norms": tuple(found["norms"]),
            "bad": None if found["bad"] is None else tuple(found["bad"]),
            "skips": Skips(ranges=tuple((first, end) for first, end in found["skips"])),
        }
    )


def _odd(state: State, seen: Seen, flags: GuardFlags) -> Verdict | None:
    """What is out of bounds, as a warning."""
    if not math.isfinite(seen.loss):
        return _verdict(seen, "not finite", "lm loss", seen.loss, math.inf)
    if seen.grad_norm is not None and not math.isfinite(seen.grad_norm):
        return _verdict(seen, "not finite", "grad norm", seen.grad_norm, math.inf)
    if state.steps < flags.guard_warmup:
        return None
    end, deviation = _expected(state.losses, LOSS_FLOOR, relative=True)
    if seen.loss > (bound := end + flags.guard_spike * deviation):
        return _verdict(seen, "spike", "lm loss", seen.loss, bound)
    if seen.loss < (bound := end - flags.guard_fall * deviation):
        return _verdict(seen, "fall", "lm loss", seen.loss, bound)
    if seen.grad_norm is None or len(state.norms) < LEAST:
        return None
    end, deviation = _expected(state.norms, NORM_FLOOR)
    if (norm := _log(seen.grad_norm)) > (bound := end + flags.guard_norm * deviation):
        return _verdict(seen, "spike", "grad norm", seen.grad_norm, math.exp(bound))
    if norm < (bound := end - flags.guard_norm * deviation):
        return _verdict(seen, "fall", "grad norm", seen.grad_norm, math.exp(bound))
    return None


def _verdict(
    seen: Seen,
    what: Literal["not finite", "spike", "fall"],
    metric: Literal["lm loss", "grad norm"],
    value: float,
    bound: float,
) -> Verdict:
    return Verdict(
        iteration=seen.iteration, what=what, metric=metric, value=value, bound=bound, action="warn"
    )


def _expected(
    values: Sequence[float], floor: float, *, relative: bool = False
) -> tuple[float, float]:
    """What follows on `values`, and how far they lie from their line.

    The line goes through the medians of both halves, so a curve that falls fast is not taken for noise.
    """
    half = len(values) // 2
    early, late = statistics.median(values[:half]), statistics.median(values[-half:])
    slope = (late - early) / (len(values) - half)
    end = late + slope * (half + 1) / 2
    apart = [
        abs(value - end + slope * steps)
        for steps, value in zip(range(len(values), 0, -1), values, strict=True)
    ]
    least = floor * (abs(late) if relative else 1.0)
    return end, max(_SIGMA * statistics.median(apart), least)


def _remembered(state: State, seen: Seen, window: int) -> State:
    """With the step in the window, where it is finite."""
    if not math.isfinite(seen.loss):
        return state
    norms = state.norms
    if seen.grad_norm is not None and math.isfinite(seen.grad_norm):
        norms = (*norms, _log(seen.grad_norm))[-window:]
    losses = (*state.losses, seen.loss)[-window:]
    return replace(state, losses=losses, norms=norms, steps=state.steps + 1)


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-300))

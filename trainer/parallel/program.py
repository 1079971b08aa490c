"""What one leaf does with a stage of the model: the module that FSDP wraps and a pipeline runs.

It calls the run's `forward_step_func`, which is Megatron's: given an iterator over batches and the model,
it returns the model's output and a function from that to the loss.

Shapes: b samples of a leaf.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastic.proto.errors import UsageError
from elastic.trainer.watch.phases import Clock, NoClock

Batch = dict[str, Tensor]
"""A leaf's tensors, [b, ...] each, by name."""
LossFunction = Callable[[Tensor], tuple[Any, ...]]
"""From the last stage's output to (sum of losses, number of tokens, reports), or to (mean, reports).
Reports are what is logged, by name: [], or [2], a sum and what it is to be divided by, also as a pair."""
ForwardStep = Callable[[Iterator[Batch], nn.Module], tuple[Tensor, LossFunction]]


class Told(NamedTuple):
    """What came of a leaf, on a rank that has the loss."""

    tokens: Tensor
    """That the loss counted, fp64 []."""
    reports: dict[str, Tensor]
    """Each fp64 [2]: a sum and what it is to be divided by."""


class Program(nn.Module):
    """A stage of a model, with the step that runs it."""

    def __init__(
        self,
        model: nn.Module,
        forward_step: ForwardStep,
        *,
        last: bool,
        clock: Clock | None = None,
    ) -> None:
        """last: whether the model ends with the loss, not with the residual stream; clock: is told of
        forward, and of backward, which is what a schedule does between two leaves' forward."""
        super().__init__()
        _check_model(model)
        self.model, self.last = model, last
        self._clock = clock or NoClock()
        self._step, self._tokens = forward_step, 1
        self._weights: Iterator[Tensor] = iter(())
        self._keys: Iterator[Tensor | None] = repeat(None)
        self.told: list[Told] = []
        """Of the leaves since `begin`, in order; empty where there is no loss."""

    def begin(self, weights: Tensor, tokens: int, keys: Tensor | None = None) -> None:
        """Before the first of n leaves. weights: what the mean loss of each is multiplied by, fp32 [n];
        tokens: of a leaf, which a sum of losses is divided by, however many of them it counts;
        keys: of the model's dropout, [n, ...], where it drops anything."""
        self._keys = repeat(None) if keys is None else iter(keys.unbind())
        self._weights, self._tokens = iter(weights.unbind()), tokens
        self.told = []

    def forward(self, hidden: Tensor | None = None, **batch: Tensor) -> Tensor:
        """The leaf's part of the batch's loss, [], or the residual stream for the next stage.

        hidden: what the stage before sent; the first stage does not look at it.
        """
        self._clock.switch("forward")
        try:
            return self._run(hidden, batch)
        finally:
            self._clock.switch("backward")

    def _run(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        weight = next(self._weights)
        model: Any = self.model
        model.set_input_tensor(hidden)
        model.expect(weight / self._tokens, batch.get("loss_mask"))
        model.drop(next(self._keys))
        output: Tensor
        output, loss_function = returned(self._step(iter([batch]), self.model), last=self.last)
        if not self.last:
            return output
        loss, counted, reports = _parts(loss_function(output))
        if counted:
            loss = loss / self._tokens
        tokens = counted[0].detach() if counted else loss.new_full((), self._tokens)
        fractions = {name: _fraction(name, value, loss.device) for name, value in reports.items()}
        self.told.append(Told(tokens.double(), fractions))
        return loss * weight


# What a script's functions return is looked at for each leaf: it costs no look at a device.


def _check_model(model: object) -> None:
    missing = [name for name in ("set_input_tensor", "expect", "drop") if not hasattr(model, name)]
    if missing:
        raise UsageError(
            f"model_provider returned {_kind(model)}, without {missing[0]}: return a GPTModel, of the part that "
            "pre_process and post_process ask for"
        )


def returned(found: Any, *, last: bool = True) -> tuple[Any, LossFunction]:
    """What a forward_step_func returned. last: its output is the script's own matter, else the next stage's."""
    match found:
        case (output, loss) if callable(loss) and (last or isinstance(output, Tensor)):
            return output, loss
    raise UsageError(
        f"forward_step returned {_kinds(found)}: return (the model's output, a function from that to the loss)"
    )


def _parts(found: Any) -> tuple[Tensor, tuple[Tensor, ...], Mapping[str, Any]]:
    """What a loss function returned: the loss, the number of tokens if that is a sum, reports."""
    match found:
        case (Tensor() as loss, Tensor() as tokens, Mapping() as reports):
            _check_loss(loss, tokens)
            return loss, (tokens,), reports
        case (Tensor() as loss, Mapping() as reports):
            _check_loss(loss)
            return loss, (), reports
    raise UsageError(
        f"the loss function returned {_kinds(found)}: return (sum of the losses, number of tokens, "
        "{name: value}), or (their mean, {name: value}), with tensors for both numbers"
    )


def _check_loss(*numbers: Tensor) -> None:
    for name, number in zip(("loss", "number of tokens"), numbers, strict=False):
        if number.numel() != 1:
            raise UsageError(
                f"the loss function returned a {name} of shape {list(number.shape)}: return one number"
            )
    if torch.is_grad_enabled() and not numbers[0].requires_grad:
        raise UsageError(
            "the loss function returned a loss that no gradient comes of: compute it of the model's output, and "
            "detach() what is reported alone"
        )


def _kinds(found: object) -> str:
    parts = found if isinstance(found, tuple) else (found,)
    return f"({', '.join(type(one).__name__ for one in parts)})"


def _kind(found: object) -> str:
    return "None" if found is None else f"a {type(found).__name__}"


def _fraction(name: object, value: Any, device: torch.device) -> Tensor:
    """A report: a sum and what it is to be divided by, fp64 [2]."""
    if not isinstance(name, str):
        raise UsageError(f"the loss function reports something as {name!r}: the names are texts")
    parts = value if isinstance(value, (tuple, list)) else (value,)
    count = sum(one.numel() if isinstance(one, Tensor) else 1 for one in parts)
    if count not in (1, 2) or not all(isinstance(one, (Tensor, Real)) for one in parts):
        shown = f"a tensor of {count} numbers" if isinstance(value, Tensor) else _kinds(value)
        raise UsageError(
            f"the loss function reports {name!r} as {shown}: report a number, or two, a sum and what it is to be "
            "divided by"
        )
    found = torch.cat([_wide(one, device).view(-1) for one in parts])
    return found if count == 2 else torch.cat((found, torch.ones_like(found)))


def _wide(number: Any, device: torch.device) -> Tensor:
    """fp64, on the device; a number of Python's is filled in, since the device would be waited for to send it."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)

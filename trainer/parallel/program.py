"""What one leaf does with a stage of the model: the module that FSDP wraps and a pipeline runs.

It calls the run's `forward_step_func`, which is Megatron's: given an iterator over batches and the model,
it returns the model's output and a function from that to the loss.

Shapes: b samples of a leaf.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
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
        output, loss_function = self._step(iter([batch]), self.model)
        if not self.last:
            return output
        loss, counted, reports = _parts(loss_function(output))
        if counted:
            loss = loss / self._tokens
        tokens = counted[0].detach() if counted else loss.new_full((), self._tokens)
        fractions = {name: _fraction(value, loss.device) for name, value in reports.items()}
        self.told.append(Told(tokens.double(), fractions))
        return loss * weight


def _parts(found: Any) -> tuple[Tensor, tuple[Tensor, ...], Mapping[str, Any]]:
    """What a loss function returned: the loss, the number of tokens if that is a sum, reports."""
    match found:
        case (Tensor() as loss, Tensor() as tokens, Mapping() as reports):
            return loss, (tokens,), reports
        case (Tensor() as loss, Mapping() as reports):
            return loss, (), reports
    kinds = [type(one).__name__ for one in (found if isinstance(found, tuple) else (found,))]
    raise UsageError(
        f"the loss function returned ({', '.join(kinds)}): return (sum of the losses, number of tokens, "
        "{name: value}), or (their mean, {name: value}), with tensors for both numbers"
    )


def _fraction(value: Any, device: torch.device) -> Tensor:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    found = torch.cat([_wide(one, device).view(-1) for one in parts])
    return found if len(found) == 2 else torch.cat((found, torch.ones_like(found)))


def _wide(number: Any, device: torch.device) -> Tensor:
    """fp64, on the device; a number of Python's is filled in, since the device would be waited for to send it."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64)
    return torch.full((), number, dtype=torch.float64, device=device)

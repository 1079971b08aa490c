"""AdamW whose moments are in host memory, and visit the device for their step a piece at a time.

Eight bytes a parameter less on the device, for as many over the bus in each direction a step. Parameters
and gradients stay where they are; moments of the next piece come in while the last one's go out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from elastic.trainer.model.tensor_parallel import local

PIECE = 1 << 25
"""Elements that are on the device at a time, three times: coming, computed with, going."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.Optimizer):
    """torch's AdamW, bit for bit: fused on GPUs, and not on CPUs, where the fused one rounds the last few
    elements of a shard otherwise, so that bits would follow from the number of shards.

    `state` has the same names, and is there from the beginning; as torch's, of what is trained alone.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """As of `torch.optim.AdamW`; fp32 parameters on one device, DTensors among them."""
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        for parameter in self._parameters():
            if parameter.requires_grad:
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    **{name: _on_host(parameter) for name in _MOMENTS},
                }

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; the moments are in host memory again when it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        visits: _Visits | None = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                both = [local(t).view(-1) for t in (parameter, parameter.grad)]
                moments = [local(state[name]).view(-1) for name in _MOMENTS]
                visits = visits or _Visits(both[0].device)
                for start in range(0, len(both[0]), PIECE):
                    part = slice(start, start + PIECE)
                    with visits.of([moment[part] for moment in moments]) as here:
                        _update(group, [t[part] for t in both], here, state["step"])
                state["step"] += 1
        if visits is not None:
            visits.end()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Moments and steps, in place: torch's would take them to the parameters' device. Those of parameters that
        had none begin again. Groups keep their options."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = dict(zip(numbers, self._parameters(), strict=True))
        for number, parameter in parameters.items():
            saved = state_dict["state"].get(number)
            for name, held in self.state.get(parameter, {}).items():
                held.copy_(saved[name]) if saved else held.zero_()

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])


class _Visits:
    """Copies to the device and back, on streams of their own where it has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._coming, self._going = (_stream(device) for _ in range(2))
        self._out: deque[torch.Event] = deque()

    @contextmanager
    def of(self, held: list[Tensor]) -> Iterator[list[Tensor]]:
        """`held`, on the device; back in its place, changed, afterwards."""
        if self._coming is None or self._going is None:
            yield held
            return
        if len(self._out) == 2:  # else the host would be ahead, and all pieces on the device
            self._out.popleft().synchronize()
        with self._coming:
            here = [part.to(self._device, non_blocking=True) for part in held]
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._coming)
        for part in here:
            part.record_stream(current)
        yield here
        self._going.wait_stream(current)
        with self._going:
            for part, changed in zip(held, here, strict=True):
                part.copy_(changed, non_blocking=True)
                changed.record_stream(self._going)
        self._out.append(self._going.record_event())

    def end(self) -> None:
        """Wait until all are back."""
        if self._going is not None:
            self._going.synchronize()


def _stream(device: torch.device) -> torch.Stream | None:
    return None if device.type == "cpu" else torch.Stream(device)


def _update(
    group: dict[str, Any], local: list[Tensor], moments: list[Tensor], step: Tensor
) -> None:
    """A piece's parameter and gradient, its moments; step: how many there were before, [] on the CPU."""
    parameter, gradient = local
    fused = parameter.is_cuda
    adamw(
        [parameter], [gradient], [moments[0]], [moments[1]], [],
        [step.to(parameter.device, copy=True)], fused=fused, foreach=False, amsgrad=False,
        beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
        weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip


def _on_host(parameter: Tensor) -> Tensor:
    """Zeros of its shape, and its pieces; pinned where that lets copies go on by themselves."""
    return torch.zeros_like(
        parameter, device="cpu", pin_memory=parameter.is_cuda, requires_grad=False
    )

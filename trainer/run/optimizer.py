"""AdamW, and its learning rate and weight decay from step to step."""

from typing import Any

import torch
from torch import Tensor, nn

from elastic.trainer.model.tensor_parallel import local
from elastic.trainer.run.host_adamw import HostAdamW


class ShardedAdamW(torch.optim.AdamW):
    """torch's, bit for bit, computed on the pieces that this rank has: by itself torch's first step works out a layout for
    all DTensors at once, and each step looks it up."""

    def _init_group(
        self, group: dict[str, Any], parameters: list[Tensor], *lists: list[Tensor]
    ) -> bool:
        found: bool = super()._init_group(group, parameters, *lists)  # type: ignore[no-untyped-call]
        gradients, averages, squares, *_ = lists
        for tensors in (parameters, gradients, averages, squares):
            tensors[:] = map(local, tensors)
        return found


def build(
    model: nn.Module, *, betas: tuple[float, float], eps: float, on_host: bool = False
) -> torch.optim.Optimizer:
    """AdamW over all parameters; biases and norms, the one-dimensional ones, do not decay.

    Rates are 0 until `set_rates`. on_host: its moments are in host memory. A state that is loaded brings
    moments and steps alone: betas, eps and whether kernels are fused stay those of this run.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "decays": True},
        {"params": [p for p in parameters if p.dim() == 1], "decays": False},
    ]
    if on_host:
        return HostAdamW(groups, lr=0.0, betas=betas, eps=eps, weight_decay=0.0)
    # On CPUs the fused one rounds the end of a shard otherwise, so bits would follow from the world.
    fused = any(p.is_cuda for p in parameters)
    adam = ShardedAdamW(groups, lr=0.0, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
    adam.register_load_state_dict_pre_hook(_keep_options)
    return adam


def set_rates(optimizer: torch.optim.Optimizer, lr: float, weight_decay: float) -> None:
    """Use both from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay if group["decays"] else 0.0


def _keep_options(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """`loaded` with the options of `optimizer`. Those in it are of another command line, or device, or of
    `HostAdamW`, which has no `fused`: torch would take kernels that end with other bits."""
    groups = [
        {**own, "params": saved["params"]}
        for own, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True)
    ]
    return {**loaded, "param_groups": groups}

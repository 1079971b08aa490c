"""`python -m tests.trainer.parallel.layouts FOLDER`: one step's loss and gradients under each layout,
against one process without any.

Each rank finds how far off the loss and each gradient are, relatively, and what collectives the forward
pass of a block made.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.data import Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.footprint import kept_by_block
from elastic.trainer.parallel.layout import Laid, Layout, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.run.step import Share, Stepper
from elastic.trainer.run.totals import num_zeros, params_norm
from tests.trainer.forks import main, whole
from tests.trainer.model.shapes import ALL, GPT2
from tests.trainer.model.test_attention import SWITCHES
from tests.trainer.parallel import one_process
from tests.trainer.parallel.one_process import SEED, Counted, reference
from tests.trainer.program import forward_step

LEAVES = Leaves(batch_size=8, leaf_size=2)
PLAIN = Layout(compute=torch.float32)
SP2 = replace(PLAIN, tp=2, sequence=True)


class Case(NamedTuple):
    shape: str
    dp: int = 1
    layout: Layout = PLAIN


CASES = {
    "gpt2": Case("gpt2"),
    "gpt2-dp3": Case("gpt2", 3),
    "gpt2-dp4": Case("gpt2", 4),
    "gpt2-dp2-fast": Case("gpt2", 2, replace(PLAIN, exact=False)),
    "gpt2-dp2-zero0": Case("gpt2", 2, replace(PLAIN, zero=0)),
    "gpt2-dp2-zero2": Case("gpt2", 2, replace(PLAIN, zero=2)),
    "gpt2-dp2-zero3": Case("gpt2", 2, replace(PLAIN, zero=3)),
    "gpt2-tp4": Case("gpt2", 1, replace(PLAIN, tp=4, attention="math")),
    "gpt2-tp2-sp": Case("gpt2", 1, SP2),
    "gpt2-dp2-tp2-sp-zero3": Case("gpt2", 2, replace(SP2, zero=3)),
    "gpt2-dp2-tp2-zero0": Case("gpt2", 2, replace(PLAIN, tp=2, zero=0)),
    "gpt2-pp2": Case("gpt2", 1, replace(PLAIN, pp=2)),
    "gpt2-dp2-pp2-zero0": Case("gpt2", 2, replace(PLAIN, pp=2, zero=0, schedule="gpipe")),
    "gpt2-tp2-sp-pp2": Case("gpt2", 1, replace(SP2, pp=2)),
    "llama-tp2": Case("llama", 1, replace(PLAIN, tp=2)),
    "llama-dp2-tp2-sp": Case("llama", 2, SP2),
    "llama-pp4": Case("llama", 1, replace(PLAIN, pp=4)),
    "llama-pp2-interleaved": Case(
        "llama", 1, replace(PLAIN, pp=2, virtual=2, schedule="interleaved")
    ),
    "llama-tp2-pp2-zero-bubble": Case(
        "llama", 1, replace(SP2, pp=2, virtual=2, schedule="zero-bubble")
    ),
    "mixed-tp2-sp": Case("mixed", 1, SP2),
    "dropped-dp2-selective": Case(
        "dropped", 2, replace(PLAIN, recompute=Recompute(granularity="selective"))
    ),
    "dropped-tp2": Case("dropped", 1, replace(PLAIN, tp=2)),
    "dropped-tp2-sp-pp2": Case("dropped", 1, replace(SP2, pp=2)),
}


SIZES = {name: case.dp * case.layout.tp * case.layout.pp for name, case in CASES.items()}


share = partial(one_process.share, config=GPT2)
"""The shapes have as many words and positions."""


def off(case: Case) -> dict[str, Any]:
    """How far off this rank is."""
    config, layout = ALL[case.shape], case.layout
    laid = lay_out(
        config, layout, make=lambda part: GPT(config, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=SEED,
        device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, config, SEED, 0.05)
    multiple, least = legal(layout.schedule, layout.pp)
    leaves = replace(LEAVES, multiple=multiple, at_least=least)
    mine = share(leaves, laid.place.dp, laid.grid.dp)
    stepper = Stepper(laid, leaf_tokens=2 * config.seq_length)
    sums = stepper.accumulate(mine, leaves)
    found = stepper.clip(sums, leaves, 0.0)
    wanted, by_name = reference(config, LEAVES, std=0.05)
    undropped, _ = reference(
        replace(config, hidden_dropout=0.0, attention_dropout=0.0), LEAVES, std=0.05
    )
    gradients = {
        name: float((whole(p.grad) - by_name[name]).norm() / by_name[name].norm())
        for name, p in laid.model.named_parameters()
        if p.grad is not None
    }
    norm = torch.stack(
        [g.norm() for name, g in by_name.items() if not (config.tied and name == "head.weight")]
    ).norm()
    weights = GPT(config)
    initialize(weights, config, SEED, 0.05)
    params = torch.stack([p.norm() for p in weights.parameters()]).norm()
    return {
        "params": abs(float(params_norm(laid) / params) - 1),
        "zeros": float(num_zeros(laid)),
        "zeros of each": {
            name: int((whole(p.grad) == 0).sum())
            for name, p in laid.model.named_parameters()
            if p.grad is not None
        },
        "loss": abs(float(sums.loss["lm loss"]) / wanted - 1),
        "norm": abs(float(found / norm) - 1),
        "overflow is seen": not bool(overflowed(laid).isfinite()),
        "evaluation": abs(float(stepper.evaluate(mine, leaves).loss["lm loss"] / undropped) - 1),
        "gradients": gradients,
        "traffic": traffic(laid, stepper, mine, leaves),
        "collectives": collectives(laid, config.hidden_size, layout),
        "schedules": [type(one).__name__ for one, _ in getattr(laid.runner, "_made", {}).values()],
        "kept": kept(laid, config, layout),
        "kernel": [name for name, (enabled, _) in SWITCHES.items() if enabled()],
    }


def overflowed(laid: Laid) -> Tensor:
    """The norm, where an element is inf that the world's last rank has, and no other; with ZeRO 0 there is none."""
    gradients = [one.grad for one in laid.model.parameters()]
    for one in gradients if dist.get_rank() == laid.grid.size - 1 else ():
        if isinstance(one, DTensor) and not any(how.is_replicate() for how in one.placements):
            one.to_local().view(-1)[:1] = torch.inf
            break
    return laid.gradients.norm()


def collectives(laid: Laid, width: int, layout: Layout) -> dict[str, int]:
    model: Any = laid.model
    block = next(iter(model.blocks.values()))
    with Counted() as counted, torch.no_grad():
        block(torch.zeros(2, 16 // (layout.tp if layout.sequence else 1), width))
    return dict(counted.calls)


def kept(laid: Laid, config: GPTConfig, layout: Layout) -> float:
    """Bytes that a block's forward keeps for backward, in those that the formula says."""
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        return tensor

    model: Any = laid.model
    block = next(iter(model.blocks.values()))
    length = config.seq_length // (layout.tp if layout.sequence else 1)
    hidden = torch.randn(2, length, config.hidden_size, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = block(hidden)
    for one in block.parameters():
        weight = one.to_local() if isinstance(one, DTensor) else one
        held.pop(weight.untyped_storage().data_ptr(), None)
    return sum(held.values()) / kept_by_block(config, layout, laid.grid, laid.place, leaf_size=2)


def traffic(laid: Laid, stepper: Stepper, mine: Share, leaves: Leaves) -> dict[str, float]:
    """What data parallelism moves in a step, in elements a parameter."""
    laid.runner.zero_grad()
    with Moved() as moved:
        stepper.accumulate(mine, leaves)
    count = sum(one.numel() for one in laid.model.parameters())
    return {name: elements / count for name, elements in moved.elements.items()}


class Moved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of whole tensors that collectives take or give."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            whole = [one for one in tree_leaves(args) if isinstance(one, Tensor)]
            self.elements[func.__name__.removesuffix(".default")] += max(
                (one.numel() for one in whole), default=0
            )
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main(SIZES, lambda name: off(CASES[name]))

"""`python -m tests.trainer.parallel.layouts FOLDER`: one step's loss and gradients under each layout,
against one process without any.

Each rank finds how far off the loss and each gradient are, relatively, and what collectives the forward
pass of a block made.
"""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.data import Leaves
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Laid, Layout, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.run.step import Share, accumulate
from tests.trainer.forks import main, whole
from tests.trainer.model.shapes import ALL

LEAVES = Leaves(batch_size=8, leaf_size=2)
COLLECTIVES = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}
PLAIN = Layout(compute=torch.float32)
SP2 = replace(PLAIN, tp=2, sequence=True)


class Case(NamedTuple):
    shape: str
    dp: int = 1
    layout: Layout = PLAIN


CASES = {
    "gpt2": Case("gpt2"),
    "gpt2-dp3": Case("gpt2", 3),
    "gpt2-dp2-fast": Case("gpt2", 2, replace(PLAIN, exact=False)),
    "gpt2-dp2-zero0": Case("gpt2", 2, replace(PLAIN, zero=0)),
    "gpt2-dp2-zero2": Case("gpt2", 2, replace(PLAIN, zero=2, exact=False)),
    "gpt2-dp2-zero3": Case("gpt2", 2, replace(PLAIN, zero=3, exact=False)),
    "gpt2-tp4": Case("gpt2", 1, replace(PLAIN, tp=4)),
    "gpt2-tp2-sp": Case("gpt2", 1, SP2),
    "gpt2-dp2-tp2-sp-zero3": Case("gpt2", 2, replace(SP2, zero=3, exact=False)),
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
}


SIZES = {name: case.dp * case.layout.tp * case.layout.pp for name, case in CASES.items()}


def share(leaves: Leaves, rank: int, size: int) -> Share:
    """What one of `size` replicas runs."""
    mine = leaves.of(0, rank, size)
    tokens = torch.randint(0, 320, (8, 17), generator=torch.Generator().manual_seed(7))
    samples = torch.cat([tokens[torch.as_tensor(leaf.places)] for leaf in mine])
    weights = torch.cat([torch.full((len(leaf.places), 16), leaf.weight / 16) for leaf in mine])
    return Share(mine, samples[:, :-1].contiguous(), samples[:, 1:].contiguous(), weights)


def reference(shape: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, which knows nothing of layouts."""
    model = GPT(ALL[shape])
    initialize(model, ALL[shape], 1234, 0.05)
    whole = share(LEAVES, 0, 1)
    loss = model(whole.inputs, whole.targets, whole.weights)[0]
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if ALL[shape].tied:
        gradients["head.weight"] = gradients["embedding.words.weight"]
    return float(loss.detach()), gradients


def off(case: Case) -> dict[str, Any]:
    """How far off this rank is."""
    config, layout = ALL[case.shape], case.layout
    laid = lay_out(
        config, layout, leaf_size=2, leaves=LEAVES.count, seed=1234, std=0.05,
        device=torch.device("cpu"),
    )  # fmt: skip
    multiple, least = legal(layout.schedule, layout.pp)
    leaves = replace(LEAVES, multiple=multiple, at_least=least)
    mine = share(leaves, laid.place.dp, laid.grid.dp)
    loss = accumulate(laid.runner, laid.gradients, mine, leaves.count, copies=layout.tp)
    wanted, by_name = reference(case.shape)
    gradients = {
        name: float((whole(p.grad) - by_name[name]).norm() / by_name[name].norm())
        for part in laid.parts
        for name, p in part.named_parameters()
        if p.grad is not None
    }
    norm = torch.stack(
        [g.norm() for name, g in by_name.items() if not (config.tied and name == "head.weight")]
    ).norm()
    return {
        "loss": abs(float(loss) / wanted - 1),
        "norm": abs(float(laid.gradients.norm() / norm) - 1),
        "gradients": gradients,
        "collectives": collectives(laid, config.hidden_size, layout),
    }


def collectives(laid: Laid, width: int, layout: Layout) -> dict[str, int]:
    block = next(iter(laid.parts[0].blocks.values()))
    with Counted() as counted, torch.no_grad():
        block(torch.zeros(2, 16 // (layout.tp if layout.sequence else 1), width))
    return dict(counted.calls)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.removesuffix(".default")
        if func.namespace == "_c10d_functional" and name in COLLECTIVES:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    main(SIZES, lambda name: off(CASES[name]))

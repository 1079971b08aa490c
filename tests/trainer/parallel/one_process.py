"""What layouts are held to, in tests and in `benchmarks.layouts`: one process that knows none, and the collectives
that they make."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.data import Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.dropout import Keys
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.run.step import Share
from tests.trainer.program import batch

SEED = 1234
"""Of weights and dropout."""
COLLECTIVES = {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"}


def share(
    leaves: Leaves, rank: int, size: int, config: GPTConfig, device: torch.device | str = "cpu"
) -> Share:
    """What one of `size` replicas runs of a batch, which whoever wants it draws anew."""
    mine = leaves.of(0, rank, size)
    shape = (leaves.batch_size, config.seq_length + 1)
    drawn = torch.randint(0, config.vocab_size, shape, generator=torch.Generator().manual_seed(7))
    places = torch.cat([torch.as_tensor(leaf.places) for leaf in mine])
    return Share(mine, batch(drawn[places].to(device)))


def reference(
    config: GPTConfig, leaves: Leaves, *, std: float, device: torch.device | str = "cpu"
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process in fp32; std: of the first weights."""
    model = GPT(config).to(device)
    initialize(model, config, SEED, std)
    whole = share(leaves, 0, 1, config, device)
    keys = Keys(seed=SEED, layers=config.num_layers, device=torch.device(device))
    total = 0.0
    for number, leaf in enumerate(whole.leaves):
        if config.drops:
            model.drop(keys.of([int(leaf.places[0])])[0])
        one = {name: tensor.chunk(leaves.count)[number] for name, tensor in whole.batch.items()}
        loss = model(one["tokens"], labels=one["labels"]).mean() / leaves.count
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if config.tied:
        gradients["head.weight"] = gradients["embedding.words.weight"]
    return total, gradients


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

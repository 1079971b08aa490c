"""Activations that are computed again in backward, so that they are not kept from forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Granularity = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """What backward computes again, under Megatron's names."""

    granularity: Granularity = "none"
    """selective: what lies between an attention's two linear layers; full: whole blocks."""
    method: Literal["uniform", "block"] = "uniform"
    """Of full. uniform: all blocks of a stage, `num_layers` at a time, of which only the input is kept;
    block: the first `num_layers` of a stage, each by itself."""
    num_layers: int = 1
    """Blocks: see `method`."""

    def groups(self, blocks: int) -> list[tuple[range, bool]]:
        """Which of a stage's blocks run one after the other, and whether backward computes them again."""
        if self.granularity != "full":
            return [(range(blocks), False)] if blocks else []
        if self.method == "block":
            first = min(self.num_layers, blocks)
            groups = [(range(number, number + 1), True) for number in range(first)]
            return groups + ([(range(first, blocks), False)] if first < blocks else [])
        starts = range(0, blocks, self.num_layers)
        return [(range(at, min(at + self.num_layers, blocks)), True) for at in starts]


def again(function: Callable[..., Tensor], *arguments: Tensor | None) -> Tensor:
    """`function(*arguments)`, of which nothing but the arguments is kept for backward."""
    # No random state has to be restored: dropout's masks are a function of an argument.
    return cast(
        Tensor, checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    )


def through(
    blocks: nn.ModuleDict,
    hidden: Tensor,
    keys: Sequence[Tensor | None] | Tensor,
    recompute: Recompute,
) -> Tensor:
    """`hidden` through `blocks`, by layer, one after the other. keys: of all layers, for dropout."""
    layers = list(blocks)

    def run(hidden: Tensor, group: range) -> Tensor:
        for layer in (layers[number] for number in group):
            hidden = blocks[layer](hidden, keys[int(layer)])
        return hidden

    for group, repeated in recompute.groups(len(layers)):
        hidden = again(partial(run, group=group), hidden) if repeated else run(hidden, group)
    return hidden

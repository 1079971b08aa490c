"""The loss of each data source of a blend. The same in any world: a leaf's numbers are one rank's.

Shapes: b samples of a leaf, S positions, D sources.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

import torch
from torch import Tensor


def of_leaf(losses: Tensor, mask: Tensor, dataset_id: Tensor, sources: int) -> Tensor:
    """Sum of losses and number of tokens of each source, fp64 [D, 2].

    losses, mask: [b, S], dataset_id: [b].
    """
    both = torch.stack(((losses * mask).sum(1, dtype=torch.float64), mask.sum(1).double()), dim=1)
    return both.new_zeros(sources, 2).index_add_(0, dataset_id, both)


def names(prefixes: Sequence[str]) -> list[str]:
    """What sources are called, from prefixes or URLs: the last part, with a number where two share it."""
    last = [PurePath(prefix).name or str(prefix) for prefix in prefixes]
    count = Counter(last)
    return [f"{name}-{number}" if count[name] > 1 else name for number, name in enumerate(last)]

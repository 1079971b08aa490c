"""What is computed again in backward ends with the same bits, and is computed as often as is said."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic.trainer.model.dropout import Keys
from elastic.trainer.model.init import initialize
from elastic.trainer.model.layers import Block
from elastic.trainer.model.recompute import Recompute, through
from elastic.trainer.model.tensor_parallel import TensorParallel
from tests.trainer.model.shapes import LLAMA

CONFIG = replace(LLAMA, hidden_dropout=0.1, attention_dropout=0.1)


def full(method: str, layers: int) -> Recompute:
    return Recompute(granularity="full", method=method, num_layers=layers)  # type: ignore[arg-type]


@given(blocks=st.integers(0, 20), layers=st.integers(1, 25), method=st.sampled_from(["uniform", "block"]))  # fmt: skip
def test_each_block_is_in_one_group_and_they_are_in_order(
    blocks: int, layers: int, method: str
) -> None:
    for recompute in (full(method, layers), Recompute()):
        groups = recompute.groups(blocks)
        assert [number for group, _ in groups for number in group] == list(range(blocks))


def test_uniform_takes_all_blocks_and_block_the_first() -> None:
    assert full("uniform", 2).groups(5) == [(range(2), True), (range(2, 4), True), (range(4, 5), True)]  # fmt: skip
    assert full("block", 2).groups(5) == [(range(1), True), (range(1, 2), True), (range(2, 5), False)]  # fmt: skip


def run(recompute: Recompute) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients of four blocks, and what was computed how often."""
    blocks = nn.ModuleDict({str(n): Block(CONFIG, TensorParallel()) for n in range(4)})
    initialize(blocks, CONFIG, 1, 0.05)
    counts: Counter[str] = Counter()
    block: Any
    for block in blocks.values():
        block.attention.recomputed = recompute.granularity == "selective"
        block.attention_norm.register_forward_hook(lambda *_: counts.update(["blocks"]))
        block.attention.rotary.register_forward_hook(lambda *_: counts.update(["cores"]))
    hidden = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    hidden.requires_grad_()
    keys = Keys(seed=1, layers=4, device=hidden.device).of([7])[0]
    torch.autograd.backward(through(blocks, hidden, keys[1:], recompute).square().sum())
    assert hidden.grad is not None
    gradients = {name: p.grad for name, p in blocks.named_parameters() if p.grad is not None}
    return {"input": hidden.grad} | gradients, counts


@pytest.mark.parametrize(
    ("recompute", "blocks", "cores"),
    [
        (Recompute(), 4, 4),
        (Recompute(granularity="selective"), 4, 8),
        (full("uniform", 1), 8, 8),
        (full("uniform", 3), 8, 8),
        (full("block", 3), 7, 7),
    ],
    ids=["none", "selective", "uniform-1", "uniform-3", "block-3"],
)
def test_gradients_are_the_same_bits_and_what_is_said_is_computed_twice(
    recompute: Recompute, blocks: int, cores: int
) -> None:
    wanted, _ = run(Recompute())
    found, counts = run(recompute)
    assert {name for name in wanted if not torch.equal(wanted[name], found[name])} == set()
    assert len(wanted) == 1 + 4 * 7
    assert counts == {"blocks": blocks, "cores": 2 * cores}  # queries and keys


def test_selective_keeps_less_of_each_block() -> None:
    kept: dict[str, int] = {}
    for recompute in (Recompute(), Recompute(granularity="selective")):
        held: dict[int, int] = {}

        def pack(tensor: Tensor, held: dict[int, int] = held) -> Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(recompute)
        kept[recompute.granularity] = sum(held.values())
    assert kept["selective"] < kept["none"]

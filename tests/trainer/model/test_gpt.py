import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from elastic.proto.errors import UsageError
from elastic.trainer.model import loss
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.tensor_parallel import TensorParallel
from tests.trainer.model.shapes import ALL, GPT2, LLAMA


def made(config: GPTConfig = GPT2, *, seed: int = 1, std: float = 0.02) -> GPT:
    model = GPT(config)
    initialize(model, config, seed, std)
    return model


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 320, (batch, length), generator=torch.Generator().manual_seed(0))


def losses(model: GPT, samples: Tensor) -> Tensor:
    """Each token's."""
    return model(samples[:, :-1], labels=samples[:, 1:])  # type: ignore[no-any-return]


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_parameter_count_is_that_of_the_shapes(config: GPTConfig) -> None:
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameter_count


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    head_size=st.integers(1, 8),
    length=st.integers(1, 32),
    vocab=st.integers(1, 500),
)
def test_gpt2s_parameter_count_is_the_closed_form(
    layers: int, heads: int, head_size: int, length: int, vocab: int
) -> None:
    hidden = heads * head_size
    config = GPTConfig(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=length,
        vocab_size=vocab,
    )  # fmt: skip
    blocks = layers * (12 * hidden**2 + 13 * hidden)
    assert config.parameter_count == blocks + 2 * hidden + (vocab + length) * hidden


def test_gpt2s_and_llama3s_parameter_counts_are_the_published_ones() -> None:
    small = GPTConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50257
    )
    llama = GPTConfig(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
        ffn_hidden_size=14336, seq_length=8192, vocab_size=128256, position="rope",
        normalization="RMSNorm", activation="swiglu", bias=False, tied=False,
    )  # fmt: skip
    assert (small.parameter_count, llama.parameter_count) == (124_439_808, 8_030_261_248)


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_a_position_does_not_see_what_follows(config: GPTConfig) -> None:
    model = made(config, std=0.2)
    before = model.logits(tokens(1, 16))
    changed = tokens(1, 16)
    changed[0, 10:] = 7
    after = model.logits(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
def test_where_a_token_stands_is_seen(config: GPTConfig) -> None:
    model = made(config, std=0.2)
    first, second = model.logits(torch.tensor([[5, 9, 7], [9, 5, 7]]))
    assert not torch.allclose(first[2], second[2])


def test_an_untrained_model_knows_nothing() -> None:
    found = losses(made(), tokens(8, 17))
    assert float(found.detach().mean()) == pytest.approx(math.log(320), rel=0.02)


def test_an_empty_share_has_no_loss_and_gradients_of_zero() -> None:
    model = made()
    loss = losses(model, tokens(0, 17)).sum()
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_positions_are_those_that_are_given() -> None:
    model, samples = made(std=0.2), tokens(2, 9)
    counted = torch.arange(9).expand(2, 9)
    torch.testing.assert_close(model(samples, counted), model(samples))
    assert not torch.allclose(model(samples, counted // 2), model(samples))


def test_an_attention_mask_is_refused() -> None:
    with pytest.raises(UsageError, match="no attention_mask"):
        made()(tokens(1, 4), None, torch.ones(1, 1, 4, 4))


# --- the loss that never holds all logits --------------------------------------------------------


@pytest.mark.parametrize("expected", [1.0, 3.0, 7.0])
@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_the_loss_and_its_gradients_are_those_of_all_logits(
    chunk: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "LOGITS", chunk * LLAMA.vocab_size)
    ours, plain = made(LLAMA, std=0.3), made(LLAMA, std=0.3)
    samples = tokens(3, 9)
    mask = torch.linspace(0, 2, 24).view(3, 8)
    ours.expect(expected)
    each = ours(samples[:, :-1], labels=samples[:, 1:], loss_mask=mask)
    torch.autograd.backward(3 * (each * mask).sum())
    logits = plain.logits(samples[:, :-1])
    wanted = F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="none")
    torch.autograd.backward(3 * (wanted * mask.flatten()).sum())
    torch.testing.assert_close(each.flatten(), wanted)
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() < 1e-6 * other.grad.norm(), name


def test_what_is_expected_changes_no_bit_where_it_comes() -> None:
    """So gradients are made with the scale that they have in the end, and not scaled once more."""
    samples, scale = tokens(3, 9), torch.tensor(1 / 7)
    model, other = made(LLAMA, std=0.3), made(LLAMA, std=0.3)
    assert other.head is not None
    model.expect(scale)
    torch.autograd.backward((losses(model, samples) * scale).sum())
    weighted = loss.cross_entropy(
        other.head.norm(other.stream(samples[:, :-1])).flatten(0, 1), other.head.weight,
        samples[:, 1:].flatten(), torch.full((24,), float(scale)), other.head.tp,
    )  # fmt: skip
    torch.autograd.backward(weighted, torch.full((24,), float(scale)))
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert same.grad is not None
        assert torch.equal(one.grad, same.grad)


def test_what_is_wanted_more_of_than_expected_is_not_off_as_a_whole_in_bf16() -> None:
    """16/15 itself is, there, by 0.3 %."""
    drawn = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=drawn).bfloat16() for n in (64, 320))
    targets, tp = torch.randint(0, 320, (64,), generator=drawn), TensorParallel()
    found: list[list[Tensor]] = []
    for scale in (1.0, 16 / 15):
        leaves = [one.clone().requires_grad_() for one in (hidden, head)]
        each = loss.cross_entropy(leaves[0], leaves[1], targets, torch.ones(64), tp)
        torch.autograd.backward(each, torch.full((64,), scale))
        found.append([one.grad.double() for one in leaves if one.grad is not None])
    for plain, more in zip(*found, strict=True):
        assert float((plain * more).sum() / plain.square().sum()) == pytest.approx(
            16 / 15, rel=1e-3
        )


def test_an_evaluation_computes_no_gradient() -> None:
    """The head's is as much work as its forward."""
    model, samples = made(LLAMA), tokens(3, 9)
    assert model.head is not None
    hidden = model.head.norm(model.stream(samples[:, :-1])).flatten(0, 1).detach()
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        loss.cross_entropy(
            hidden, model.head.weight, samples[:, 1:].flatten(), torch.ones(24), model.head.tp
        )
    assert counted.get_total_flops() == 2 * 24 * model.head.weight.numel()


def test_losses_that_are_weighted_by_something_else_have_no_gradient() -> None:
    """Rather than a wrong one: the gradients were made for the loss mask."""
    model, samples = made(LLAMA), tokens(3, 9)
    torch.autograd.backward((losses(model, samples) * torch.linspace(0, 2, 24).view(3, 8)).sum())
    assert model.head is not None
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.isnan().all()


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    model = made(LLAMA)
    assert model.head is not None
    model.head.weight.requires_grad_(False)
    torch.autograd.backward(losses(model, tokens(2, 9)).sum())
    assert model.head.weight.grad is None
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


# --- parts of a model, first weights -------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["tied", "untied"])
def test_parts_one_after_the_other_are_the_model(config: GPTConfig) -> None:
    whole, samples = made(config), tokens(2, 9)
    parts = [
        GPT(config, layers=range(1)),
        GPT(config, layers=range(1, config.num_layers)),
    ]
    for part in parts:
        initialize(part, config, 1, 0.02)
    assert [part.embedding is not None for part in parts] == [True, False]
    assert [part.head is not None for part in parts] == [False, True]
    hidden = parts[0](samples[:, :-1])
    if config.tied:  # the second part has a copy of the words, by the head's name
        parts[1].load_state_dict({"head.weight": whole.state_dict()["head.weight"]}, strict=False)
    parts[1].set_input_tensor(hidden)
    assert torch.equal(parts[1](None, labels=samples[:, 1:]), losses(whole, samples))


def test_first_weights_depend_on_seed_and_name_alone() -> None:
    first = made()
    torch.rand(5)  # the global generator has no part in it
    again, other = made().state_dict(), made(seed=2).state_dict()
    deeper = made(replace(GPT2, num_layers=3)).state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again[name])
        if "output" not in name:  # whose deviation is a function of the depth
            assert torch.equal(weight, deeper[name])
    name = "embedding.words.weight"
    assert not torch.equal(first.state_dict()[name], other[name])


def test_what_writes_to_the_residual_stream_starts_smaller() -> None:
    state = made(std=0.1).state_dict()
    assert float(state["blocks.0.mlp.up.weight"].std()) == pytest.approx(0.1, rel=0.05)
    assert float(state["blocks.0.mlp.output.weight"].std()) == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_layers": 0},
        {"num_attention_heads": 5},
        {"num_query_groups": 3},
        {"rotary_percent": 0.4, "position": "rope"},
    ],
    ids=str,
)
def test_an_impossible_shape_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(GPT2, **wrong)


@pytest.mark.parametrize(("tp", "what"), [(3, "num_attention_heads"), (4, "num_query_groups")])
def test_a_model_that_cannot_be_shared_out_is_refused_by_name(tp: int, what: str) -> None:
    with pytest.raises(UsageError, match=f"{tp} does not divide {what}"):
        LLAMA.check_split(tp)

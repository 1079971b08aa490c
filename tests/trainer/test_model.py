import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.trainer.model import GPT, GPTConfig, init_weights

SMALL = GPTConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=300
)


def made(config: GPTConfig = SMALL, *, seed: int = 1, std: float = 0.02) -> GPT:
    model = GPT(config)
    init_weights(model, seed, std)
    return model


@settings(max_examples=20, deadline=None)
@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 4),
    head_size=st.integers(1, 8),
    length=st.integers(1, 32),
    vocab=st.integers(1, 500),
)
def test_parameter_count_is_the_closed_form(
    layers: int, heads: int, head_size: int, length: int, vocab: int
) -> None:
    config = GPTConfig(
        num_layers=layers,
        hidden_size=heads * head_size,
        num_attention_heads=heads,
        seq_length=length,
        vocab_size=vocab,
    )
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameter_count


def test_logits_have_one_score_a_token_id() -> None:
    assert made().logits(torch.zeros(3, 7, dtype=torch.int64)).shape == (3, 7, 300)


def test_a_position_does_not_see_what_follows() -> None:
    model = made(std=0.2)
    tokens = torch.randint(0, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = 7
    before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_an_untrained_model_knows_nothing() -> None:
    samples = torch.randint(0, 300, (8, 17), generator=torch.Generator().manual_seed(0))
    loss = made()(samples).detach()
    assert float(loss) / (8 * 16) == pytest.approx(math.log(300), rel=0.02)


def test_an_empty_share_has_no_loss_and_gradients_of_zero() -> None:
    model = made()
    loss = model(torch.zeros(0, 17, dtype=torch.int64))
    torch.autograd.backward(loss)
    assert float(loss.detach()) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_first_weights_depend_on_seed_and_name_alone() -> None:
    deep = made(GPTConfig(**{name: getattr(SMALL, name) for name in SMALL.__slots__}))
    torch.rand(5)  # the global generator has no part in it
    again = made()
    other = made(seed=2)
    for name, weight in deep.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    assert not torch.equal(deep.token_embedding.weight, other.token_embedding.weight)


def test_a_block_starts_the_same_in_a_part_of_the_model() -> None:
    whole, part = made(), GPT(SMALL)
    del part.blocks[1]  # as a stage of a pipeline would
    init_weights(part, 1, 0.02)
    mine = part.state_dict()
    assert all(torch.equal(mine[name], whole.state_dict()[name]) for name in mine)


def test_what_writes_to_the_residual_stream_starts_smaller() -> None:
    state = made(std=0.1).state_dict()
    assert float(state["blocks.0.mlp.up.weight"].std()) == pytest.approx(0.1, rel=0.05)
    assert float(state["blocks.0.mlp.output.weight"].std()) == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(("field", "value"), [("num_layers", 0), ("num_attention_heads", 5)])
def test_an_impossible_shape_is_refused_by_name(field: str, value: int) -> None:
    shape = {name: getattr(SMALL, name) for name in SMALL.__slots__}
    with pytest.raises(ValueError, match=field):
        GPTConfig(**(shape | {field: value}))

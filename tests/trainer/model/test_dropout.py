"""What dropout drops depends on (seed, step, leaf, layer, place) and on nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastic.trainer.model.dropout import Dropout, Keys, attend, kept

CPU = torch.device("cpu")
KEY = Keys(seed=1, layers=1, device=CPU).of([7])[0, 1]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_a_part_is_dropped_evenly_over_rows_and_columns(rate: float) -> None:
    mask = kept(KEY, 0, torch.arange(1000), 1000, rate).double()
    assert float(mask.mean()) == pytest.approx(1 - rate, abs=0.005)
    deviation = (rate * (1 - rate) / 1000) ** 0.5
    assert float(mask.mean(0).std()) == pytest.approx(deviation, rel=0.15)
    assert float(mask.mean(1).std()) == pytest.approx(deviation, rel=0.15)


def test_masks_of_different_leaves_layers_and_places_have_nothing_to_do_with_one_another() -> None:
    keys = [
        key for seed in (1, 2) for key in Keys(seed=seed, layers=2, device=CPU).of([3, 4, 2**40])
    ]
    rows = torch.arange(100)
    masks = [kept(key, site, rows, 1000, 0.5) for four in keys for key in four for site in (0, 1)]
    masks += [kept(keys[0][0], 0, rows + (number << 32), 1000, 0.5) for number in (1, 2)]
    signs = torch.stack(masks).flatten(1).double() * 2 - 1
    alike = signs @ signs.t() / signs.shape[1] - torch.eye(len(masks))
    assert float(alike.abs().max()) < 0.02  # deviation 0.003


def test_a_mean_stays_and_without_a_key_nothing_is_dropped() -> None:
    dropout, ones = Dropout(0.3, 0, 0), torch.ones(4, 64, 256)
    assert float(dropout(ones, KEY).mean()) == pytest.approx(1, abs=0.01)
    assert dropout(ones, None) is ones


def test_each_rank_of_a_sequence_drops_what_one_rank_would() -> None:
    hidden = drawn(2, 16, 8)
    whole = Dropout(0.5, 1, 0)(hidden, KEY)
    parts = [Dropout(0.5, 1, n)(part, KEY) for n, part in enumerate(hidden.chunk(4, dim=1))]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    assert not torch.equal(Dropout(0.5, 1, 1)(hidden, KEY), whole)


def test_attention_without_anything_to_drop_is_the_fused_one() -> None:
    query, key, value = drawn(2, 4, 8, 16), drawn(2, 2, 8, 16) + 1, drawn(2, 2, 8, 16) - 1
    mine = attend(query, key, value, dropout_key=KEY, site=0, heads=0, rate=0.0)
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(mine, wanted)


def test_each_rank_of_a_layer_drops_what_one_rank_would() -> None:
    query, key, value = drawn(3, 2, 4, 8, 16).unbind()
    whole = attend(query, key, value, dropout_key=KEY, site=0, heads=0, rate=0.5)
    parts = [
        attend(*(t[:, at : at + 2] for t in (query, key, value)), dropout_key=KEY, site=0, heads=at, rate=0.5)
        for at in (0, 2)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    plain = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert not torch.allclose(whole, plain)

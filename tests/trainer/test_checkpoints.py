from dataclasses import replace
from typing import Any

import pytest

from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.checkpoints import check_weights, config_of, identity_of
from tests.trainer.model.shapes import ALL, GPT2, LLAMA


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_checkpoint_says_what_its_model_is(name: str) -> None:
    identity = identity_of(ALL[name]) | {"seed": 1, "data": "x"}
    assert config_of(identity, "run") == ALL[name]
    check_weights(identity, ALL[name], "run")


@pytest.mark.parametrize("identity", [None, 3, {}, [], {"num_layers": "x"}, {"num_layers": 2}])
def test_one_that_does_not_is_another_programs(identity: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^run is no checkpoint of elastic\.trainer"):
        config_of(identity, "run")


@pytest.mark.parametrize(
    "same",
    [
        replace(GPT2, ffn_hidden_size=128), replace(GPT2, num_query_groups=4),
        replace(GPT2, kv_channels=8), replace(GPT2, max_positions=16, seq_length=8),
        replace(GPT2, hidden_dropout=0.1, attention_dropout=0.1), replace(GPT2, rotary_base=1.0),
        replace(GPT2, qkv_bias=True),
    ],
)  # fmt: skip
def test_the_same_weights_however_their_model_is_written(same: Any) -> None:
    check_weights(identity_of(GPT2), same, "run")
    check_weights(identity_of(same), GPT2, "run")


@pytest.mark.parametrize(
    ("config", "other", "named"),
    [
        (GPT2, {"num_layers": 3}, "num_layers 2, not 3"),
        (GPT2, {"max_positions": 17}, "max_positions 16, not 17"),
        (GPT2, {"ffn_hidden_size": 64}, "ffn_hidden_size 128, not 64"),
        (GPT2, {"tied": False}, "tied True, not False"),
        (LLAMA, {"num_query_groups": None}, "num_query_groups 2, not 4"),
        (LLAMA, {"rotary_base": 5e5}, r"rotary_base 10000\.0, not 500000\.0"),
        (LLAMA, {"norm_epsilon": 1e-6}, "norm_epsilon 1e-05, not 1e-06"),
    ],
)
def test_other_weights_are_refused_by_the_setting(config: Any, other: Any, named: str) -> None:
    with pytest.raises(UsageError, match=f"^run is of a model with {named}"):
        check_weights(identity_of(config), replace(config, **other), "run")

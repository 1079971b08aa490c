"""What a team's script gets of `get_args()`: Megatron's names, and what Megatron fills in."""

import argparse

import pytest
import torch

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.namespace import namespace, shown
from elastic.trainer.arguments.parse import parse
from tests.trainer.arguments.test_effects import BASE, DATA, run


def test_names_and_what_is_filled_in_are_megatrons() -> None:
    settings = run(
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16",
        "--num-virtual-stages-per-pipeline-rank 2 --sequence-parallel --transformer-impl local",
        "--save s --tensorboard-dir t",
    )
    args = namespace(settings, world_size=8, rank=3, padded_vocab_size=128)
    assert (args.world_size, args.rank, args.data_parallel_size) == (8, 3, 2)
    assert args.virtual_pipeline_model_parallel_size == 2
    assert (args.hidden_size, args.ffn_hidden_size, args.kv_channels) == (64, 256, 16)
    assert (args.num_query_groups, args.max_position_embeddings) == (4, 32)
    assert args.params_dtype is torch.bfloat16
    assert (args.padded_vocab_size, args.consumed_train_samples, args.iteration) == (128, 0, 0)
    assert (args.data_path, args.mock_data, args.transformer_impl) == (None, True, "local")
    assert (args.save, args.tensorboard_dir, args.lr) == ("s", "t", 0.1)
    args.iteration = 7  # as mutable as Megatron's


def test_a_run_counted_in_samples_has_its_iterations_too() -> None:
    """As Megatron fills them in, those of a ramp with smaller batches."""
    samples = f"{BASE} {DATA}".replace("--train-iters 100", "--train-samples 19")
    for flags, iterations in (("", 2), (" --rampup-batch-size 4 4 8", 3)):
        settings = parse((samples + flags).split())
        args = namespace(settings, world_size=1, rank=0)
        assert (args.train_samples, args.train_iters) == (19, iterations)


def test_a_teams_own_arguments_are_in_it() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group(title="ours")
        group.add_argument("--our-temperature", type=float)
        return parser

    settings = parse(f"{BASE} {DATA} --our-temperature 0.3".split(), provider)
    assert namespace(settings, world_size=1, rank=0).our_temperature == 0.3
    settings = parse(f"{BASE} {DATA}".split(), provider)
    assert namespace(settings, world_size=1, rank=0).our_temperature is None


def test_a_world_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="start 2 or a multiple"):
        namespace(run("--tensor-model-parallel-size 2"), world_size=3, rank=0)


def test_what_may_be_credentials_is_not_shown_to_who_sees_the_run() -> None:
    settings = run("--data-storage-options", '{"secret":"sesame"}')
    args = namespace(settings, world_size=1, rank=0, padded_vocab_size=128)
    assert "sesame" in args.data_storage_options, "the script has all"
    assert "sesame" not in str(shown(args))
    assert shown(args)["hidden_size"] == 64

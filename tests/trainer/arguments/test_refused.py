"""Every argument of Megatron's is accepted, without effect, or refused by name; others are not there."""

from pathlib import Path

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.arguments import refused
from elastic.trainer.arguments.parse import flags, parse
from tests.trainer.arguments.test_effects import run

LINES = (Path(__file__).parent / "megatron_names.txt").read_text().splitlines()[1:]
NAMES = [name for line in LINES for name in line.split()]


def test_every_argument_of_megatrons_is_known() -> None:
    assert len(NAMES) > 600
    accepted = flags()
    assert not {
        name for name in NAMES if f"--{name}" not in accepted and refused.reason(name) is None
    }


def test_what_is_accepted_is_not_refused() -> None:
    assert not {flag for flag in flags() if refused.bare(flag) in refused.EXACT}


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "--num-experts 8",
            "--num-experts is Megatron's, and refused here: mixture of experts comes",
        ),
        ("--num-experts=8", "--num-experts is Megatron's, and refused here"),
        ("--moe-of-tomorrow 8", "mixture of experts comes later"),
        ("--context-parallel-size 2", "context parallelism comes later"),
        ("--fp8-format hybrid", "fp8 comes later: take --bf16"),
        ("--max-global-batch-size 16", "the planner comes later"),
        ("--no_bias_gelu_fusion", "--no-bias-gelu-fusion is Megatron's"),
        ("--use-checkpoint-opt_param-scheduler", "see --save, --load, --keep"),
        ("--model-parallel-size 2", "give --tensor-model-parallel-size"),
        ("--hiden-size 8", "there is no argument --hiden-size: did you mean --hidden-size"),
        ("--num_layers 3", "no argument --num_layers: did you mean --num-layers"),
        ("--num_layer=3", "no argument --num_layer: did you mean --num-layers"),
        ("--bogus 3", "there is no argument --bogus; see --help"),
        ("--max-steps 3", "there is no argument --max-steps; see --help"),
        ("--xyzzy", "there is no argument --xyzzy; see --help"),
        ("stray", "stray belongs to no argument"),
        ("--swiglu true stray", "stray belongs to no argument"),
        ("-x 3", "-x belongs to no argument"),
    ],
)
def test_what_is_not_accepted_is_one_line(said: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        run(said)
    assert "\n" not in str(raised.value)


def test_it_is_said_before_anything_else_that_is_wrong() -> None:
    with pytest.raises(UsageError, match="mixture of experts"):
        parse(["--num-experts", "8", "--micro-batch-size", "0"])


def test_what_asks_for_nothing_is_passed_over_and_said() -> None:
    settings = run("--context-parallel-size 1 --expert-model-parallel-size=1 --attention-dropout 0")
    (note,) = settings.notes
    assert "--context-parallel-size, --expert-model-parallel-size" in note

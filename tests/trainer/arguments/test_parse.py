"""The command line to settings: names, forms, defaults, and what does not fit together."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.options import doc_strings
from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import OF_A_NODE, subjects

NEEDED = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 10 --lr 0.1 --mock-data --vocab-size 100"
)


def given(more: str = "") -> list[str]:
    return f"{NEEDED} {more}".split()


def test_a_switch_is_a_flag_or_says_true_or_false() -> None:
    assert not parse(given()).model.swiglu
    for more in ("--swiglu", "--swiglu true", "--swiglu=TRUE", "--swiglu false --swiglu"):
        assert parse(given(more)).model.swiglu
    assert not parse(given("--swiglu --swiglu false")).model.swiglu
    for more in ("--disable-bias-linear", "--add-bias-linear false", "--disable-bias-linear true"):
        assert not parse(given(more)).model.add_bias_linear
    assert parse(given("--disable-bias-linear false")).model.add_bias_linear


def test_a_flag_may_stand_for_a_value_of_another() -> None:
    assert parse(given("--recompute-activations")).layout.recompute_granularity == "selective"
    assert parse(given("--recompute-activations false")).layout.recompute_granularity is None


def test_a_teams_own_arguments_and_defaults() -> None:
    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--our-temperature", type=float, default=0.5)
        parser.add_argument("--our-switch", action="store_true")
        return parser

    settings = parse(
        given("--our-switch --hidden-dropout 0.3"), provider,
        {"hidden_dropout": 0.2, "attention_dropout": 0.2, "our_temperature": 0.7},
    )  # fmt: skip
    assert settings.team == {"our_temperature": 0.7, "our_switch": True}
    assert (settings.model.hidden_dropout, settings.model.attention_dropout) == (0.3, 0.2)

    def ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--seed", type=int)
        return parser

    with pytest.raises(UsageError, match=r"one of ours already.*--seed"):
        parse(given(), ours)


def test_what_two_subjects_need_is_one_option() -> None:
    settings = parse(given("--seed 7"))
    assert settings.model.seed == settings.data.seed == 7
    assert settings.data.seq_length == settings.schedules.seq_length == 32
    found: dict[str, list[Any]] = {}
    for kind in subjects().values():
        types = get_type_hints(kind)
        for one in fields(kind):
            found.setdefault(one.name, []).append((types[one.name], one.default, one.metadata))
    assert not {name for name, said in found.items() if any(one != said[0] for one in said)}


def test_what_nodes_have_to_be_told_alike() -> None:
    """All but where things are, and what a rank does by itself."""
    common = parse(given("--save s --tensorboard-dir a --metrics-file m --num-workers 3")).common()
    assert common["--tensorboard-dir"] is True
    assert common["--save"] == "s"
    assert {"--eval-interval", "--zero-stage", "--guard", "--log-params-norm"} <= common.keys()
    assert not {"--metrics-file", "--num-workers", "--data-cache-path"} & common.keys()
    other = parse(given("--save s --tensorboard-dir b --num-workers 4 --eval-iters 7")).common()
    assert {name for name in common if common[name] != other[name]} == {"--eval-iters"}
    names = {one.name for kind in subjects().values() for one in fields(kind)}
    assert names >= OF_A_NODE


def test_what_costs_or_is_of_no_use_here_is_said() -> None:
    def said(more: str) -> str:
        return " ".join(parse(given(f"--attention-dropout 0 {more}")).notes)

    assert said("") == ""
    assert "--attention-dropout 0 has it fused" in said("--attention-dropout 0.1")
    assert "--guard rollback has nothing to go back to without --save" in said("--guard rollback")
    assert said("--guard rollback --save s") == said("--guard warn --guard-spike 3") == ""
    for kind in ("local", "torch"):
        assert "--DDP-impl has no effect here" in said(f"--DDP-impl {kind}")


def test_every_field_says_what_it_is() -> None:
    silent = {
        one.name
        for kind in subjects().values()
        for one in fields(kind)
        if not doc_strings(kind).get(one.name)
    }
    assert not silent


def test_help_is_by_subject_and_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "\nOptimizer and precision:\n" in text
    text = " ".join(text.split())
    assert "Width of the residual stream. Has to be given." in text
    assert "Steps until --min-lr, warm-up included; if not given all." in text


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--global-batch-size 9", "no multiple of --micro-batch-size 2"),
        ("--rampup-batch-size 3 1 100", "a batch of 3 samples is no multiple"),
        ("--DDP-impl apex", "--DDP-impl: invalid choice: 'apex'"),
        (
            "--offload nvme",
            "--offload nvme is refused: offload to NVMe comes later; the nearest is --offload all",
        ),
        (
            "--vocab-file v --tokenizer-model t",
            "--vocab-file with --tokenizer-model are two tokenizers",
        ),
        ("--merge-file v --vocab-file m --tokenizer-model t", "are two tokenizers"),
        (
            "--attention-backend flash --attention-dropout 0.1",
            "--attention-backend flash computes no --attention-dropout, which is 0.1: give",
        ),
        ("--use-flash-attn", "--attention-backend flash computes no --attention-dropout"),
        ("--attention-backend fused", "give --attention-dropout 0"),
        (
            "--use-flash-attn --attention-backend unfused",
            "--attention-backend asks for unfused and --use-flash-attn for flash: give one of them",
        ),
        ("--attention-backend=unfused --use-flash-attn", "asks for unfused and"),
        ("--optimizer-cpu-offload --offload all", "--optimizer-cpu-offload for optimizer"),
        (
            "--checkpoint-activations --recompute-activations",
            "for selective and --checkpoint-activations for full",
        ),
        ("--data-path a --data-path b", "--data-path is given twice: give all of it once"),
        ("--train-data-path=a --train-data-path b", "--train-data-path is given twice"),
        ("--validation-set-names a --validation-set-names b", "--validation-set-names is given"),
        ("--rampup-batch-size 2 2 9 --rampup-batch-size 2 2 8", "--rampup-batch-size is given"),
        ("--micro-batch-size 0", "--micro-batch-size is at least 1"),
        ("--fp16 --bf16", "give one of them"),
        ("--hidden-size 65", "give kv_channels"),
        ("--tensor-model-parallel-size 3", "does not divide num_attention_heads 4"),
        (
            "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 30",
            "size 4 does not divide --sequence-parallel's seq_length 30",
        ),
        (
            "--attention-backend fused --attention-dropout 0",
            "exact forbids: take --attention-backend flash",
        ),
        ("--pipeline-model-parallel-size 5", "4 layers are too few for 5"),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
            "does not divide the layers of a rank",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", "wants --pipeline-model-parallel-size above"),
        ("--pipeline-schedule gpipe", "wants --pipeline-model-parallel-size above"),
        ("--use-distributed-optimizer --zero-stage 0", "different stages of ZeRO"),
        ("--zero-stage 2 --pipeline-model-parallel-size 2", "ZeRO 2"),
        ("--max-position-embeddings 31", "less than --seq-length 32"),
        ("--num-query-groups 2", "wants --group-query-attention"),
        ("--seed -1", "--seed is between"),
        (
            "--recompute-method uniform --recompute-activations",
            "wants --recompute-granularity full",
        ),
        ("--finetune", "--finetune wants --load"),
        ("--finetune --load d --save d/../d/", "it goes on from the newest in --save"),
        ("--ckpt-step 3 --load d --save d", "--ckpt-step is of what a run begins from"),
        ("--hidden-dropout 1", "hidden_dropout must be from 0 to less than 1"),
        ("--clip-grad nan", "--clip-grad is at least 0, not nan"),
        ("--rotary-percent 1.5", "--rotary-percent is above 0 and at most 1"),
        ("--ffn-hidden-size 0", "--ffn-hidden-size is at least 1"),
        ("--train-iters 2.5", "--train-iters: invalid int value: '2.5'"),
        ("--normalization GroupNorm", "--normalization: invalid choice: 'GroupNorm'"),
        ("--swiglu maybe", "maybe is neither true nor false"),
        ("--loss-scale 2", "--loss-scale wants --fp16"),
        ("--wandb-project p", "wants --wandb-exp-name"),
        ("--data-path a b", "data are given in one way"),
        ("--tokenizer-type GPT2BPETokenizer", "needs --vocab-file"),
        ("--train-iters 99999999999999999999", "samples are more than can be counted"),
        ("--lr nan", "--lr is at least 0, and finite, not nan"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(more: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        parse(given(more))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("train_iters: 3\ntrain_iters: 4\n", "gives train_iters twice, again in line 2"),
        ("train_iters: 3\ntrain-iters: 4\n", "gives train_iters twice"),
        ("language_model: {hidden_size: 3, hidden_size: 4}", "gives hidden_size twice"),
        ("yaml_cfg: other.yaml", "names another file"),
        (f"train_iters: {'9' * 5000}", "is no YAML: Exceeds the limit"),
        ("a: " + "[" * 5000, "is no YAML: maximum recursion depth"),
        ("a: [1\n b: }", "is no YAML: while parsing a flow sequence"),
    ],
)
def test_a_file_that_says_no_arguments_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=why) as raised:
        parse([*given(), "--yaml-cfg", str(file)])
    assert "\n" not in str(raised.value)


def test_what_has_to_be_given_is_said() -> None:
    with pytest.raises(UsageError, match="give --num-layers: Blocks"):
        parse([])


def test_a_world_is_checked_once_it_is_known() -> None:
    flags = parse(given("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2")).layout
    flags.check_world(12)
    with pytest.raises(
        UsageError, match=r"6 ranks were started, .* no multiple of 4: start 4 or a multiple"
    ):
        flags.check_world(6)
    flags = parse(given("--tensor-model-parallel-size 2 --data-parallel-size 3")).layout
    flags.check_world(6)
    with pytest.raises(UsageError, match="are 6 ranks, and the world has 8"):
        flags.check_world(8)


def test_what_stands_for_a_value_agrees_with_it_and_a_command_line_wins_over_a_file(
    tmp_path: Path,
) -> None:
    for more in (
        "--use-flash-attn --attention-backend flash",
        "--use-flash-attn false --attention-backend unfused",
        "--attention-backend unfused --attention-backend flash",  # of one flag, the last one counts
    ):
        parse(given(f"{more} --attention-dropout 0"))
    file = tmp_path / "a.yaml"
    file.write_text("attention_backend: unfused\n")
    more = f"--use-flash-attn --attention-dropout 0 --yaml-cfg {file}"
    assert parse(given(more)).layout.attention_backend == "flash"
    file.write_text("attention_backend: unfused\nuse_flash_attn: true\n")
    with pytest.raises(UsageError, match="--use-flash-attn for flash"):
        parse(given(f"--attention-dropout 0 --yaml-cfg {file}"))


def test_one_rank_is_told_to_start_more() -> None:
    with pytest.raises(UsageError, match=r"size 1: 1 rank was started, .* start 2 or a multiple"):
        parse(given("--tensor-model-parallel-size 2")).layout.check_world(1)

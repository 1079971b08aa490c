"""What bad input gets: one line, before any step, and status 2. Many runs in one process."""

import shutil
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.trainer.checkpoints import load_model, opened, save_model
from elastic.trainer.convert import reading
from elastic.trainer.pretrain import pretrain
from tests.trainer.arguments import tiny
from tests.trainer.arguments.tiny import SAVED

pytestmark = pytest.mark.xdist_group("bad-input")  # one run for all of them

MODELS = Path(__file__).parent / "convert" / "golden"
LLAMA = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--kv-channels 4 --ffn-hidden-size 24 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 "
    "--position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights "
    "--disable-bias-linear --seq-length 8 --make-vocab-size-divisible-by 128 --vocab-size 39"
)
"""The shape of golden/llama, on shorter samples."""
TUNED = f"{LLAMA} --load {{base}}/imported --finetune --save {{base}}/tuned --lr 0 --train-iters 1"
LARGE = "--ffn-hidden-size 1000000000000"
DIVERGES = "--lr 1e30 --clip-grad 0"
FP16_DIVERGES = (
    "--fp16 --lr 1e7 --clip-grad 0 --initial-loss-scale 4 --min-loss-scale 1 --attention-backend unfused "
    "--train-iters 9"
)

REFUSED = {
    "a folder that cannot be": (
        "--save /proc/none", "--save /proc/none cannot be written to: No such file or directory",
    ),
    "finetuning of nothing": ("--load {base}/nothing --finetune", "nothing holds no checkpoint"),
    "nothing, asked to be there": (
        "--load {base}/nothing --exit-on-missing-checkpoint", "nothing holds no checkpoint",
    ),
    "nothing in --save, asked to be there": (
        "--load {base}/none --save {base}/none --exit-on-missing-checkpoint", "none holds no checkpoint",
    ),
    "finetuning of nothing, saved": (
        "--load {base}/nothing --finetune --save {base}/new", "nothing holds no checkpoint",
    ),
    "one step": (
        "--load {base}/saved/step-00000002",
        "saved/step-00000002 is one step: give --load {base}/saved, and --ckpt-step 2 if",
    ),
    "a model alone": (
        TUNED.replace("--finetune ", "").replace("tuned", "other"),
        "{base}/imported holds a model alone: give --load {base}/imported --finetune and another --save",
    ),
    "a model alone, to go on from": (
        f"{LLAMA} --save {{base}}/imported",
        "{base}/imported holds a model alone: give --load {base}/imported --finetune and another --save",
    ),
    "a folder of Megatron's": (
        "--load {base}/megatron", "megatron holds no checkpoint of ours, but Megatron's, which is not read",
    ),
    "a folder of Hugging Face's": (
        "--load {base}/llama", "a model of Hugging Face's: make it one by `elasticctl hf import",
    ),
    "another batch": (
        f"{SAVED} --global-batch-size 8", "has batches of 4 samples, not 8: give the same value",
    ),
    "another model": (
        f"{SAVED} --hidden-size 24", "hidden_size 16, not 24: give the same value",
    ),
    "another tokenizer": (
        f"{SAVED} --vocab-size 61", "saved was trained with another tokenizer: give that one, or --load",
    ),
    "another loss mask": (
        f"{SAVED} --eod-mask-loss", "with another loss mask or other position ids: give the same data",
    ),
    "other position ids": (
        f"{SAVED} --reset-position-ids", "with another loss mask or other position ids: give the same data",
    ),
    "another micro-batch": (f"{SAVED} --micro-batch-size 4", "with micro-batch size 2, not 4, so the"),
    "another precision": (f"{SAVED} --bf16", "made with computes in float32, not bfloat16, so"),
    "compiled now": (f"{SAVED} --compile", "made with compiled False, not True, so the run would not"),
    "another kernel": (
        f"{SAVED} --attention-backend unfused", "made with attention kernel flash, not math, so the run",
    ),
    "a script's threads": (f"{SAVED} --own-threads 2", "made with threads 1, not 2, so the run would"),
    "fast until now": (
        "--save {base}/fast --train-iters 6", "made with reduction fast, not exact, so the run would not",
    ),
    "another base": (
        f"{TUNED} --save {{base}}/other --rotary-base 10000", "is of a model with rotary_base 500000.0, not 10000.0",
    ),
    "more layers": (f"{TUNED} --save {{base}}/other --num-layers 3", "is of a model with num_layers 2, not 3"),
    "NaN": (
        f"{DIVERGES} --save {{base}}/diverged --save-interval 2 --train-iters 9",
        "iteration 2: the gradient is not finite (lm loss nan)",
    ),
    "NaN, where it ends": (
        f"{DIVERGES} --save {{base}}/ended --train-iters 9 --log-interval 9 --exit-interval 4",
        "iteration 2: the gradient is not finite (lm loss nan)",
    ),
    "NaN in fp16, which is skipped": (
        f"{FP16_DIVERGES} --log-interval 9 --guard warn --save {{base}}/scaled",
        "iteration 2: the loss is not finite (lm loss nan), whatever it is scaled by: stopping",
    ),
    "NaN, with nothing saved": (
        "--init-method-std 1e30 --guard rollback --save {base}/odd",
        "iteration 1: lm loss nan is not finite, and nothing is saved to go back to: stopping",
    ),
    "nothing to train on": ('--own-data none', "there is nothing to train on: give --data-path"),
    "too little to train on": (
        "--own-data few", "the run trains on 12 samples, and the data have 9: make it shorter",
    ),
    "two of three": ("--own-data two", "is to return train, valid, test: three, or None for each"),
    "validation on nothing": (
        "--own-data novalidation --eval-iters 1", "there are validation data without any sample",
    ),
    "a guard without a loss": (
        "--own-loss none --guard warn", "--guard looks at a loss, and the loss function reports none",
    ),
    "NaN, with nothing to be saved": (
        "--init-method-std 1e30 --guard rollback", "nothing is saved to go back to: stopping",
    ),
}  # fmt: skip
"""Arguments, and what is said last."""
SAID = {
    "finished": (SAVED, "nothing to train: 3 of 3 iterations are finished"),
    "more than finished": (
        f"{SAVED} --train-iters 2 --eval-iters 1", "nothing to train: 3 of 2 iterations are finished",
    ),
    "fast": ("--save {base}/fast --reduction fast", "starting from step 0"),
    "fast from now on": (
        f"{SAVED} --reduction fast", "resumed under other conditions: reduction exact -> fast",
    ),
    "another recipe": (
        f"{SAVED} --lr 2e-2 --clip-grad 0.5",
        "resumed with another recipe: lr 0.01 -> 0.02, clip-grad 1.0 -> 0.5",
    ),
    "a script's data, to be trained on": ("--own-data asked --save {base}/own", "starting from step 0"),
    "a script's data, to be trained on for longer": (
        "--own-data asked --save {base}/own --train-iters 4", "resumed from step 3",
    ),
    "nothing to load": (
        "--load {base}/nothing", "nothing holds no checkpoint: the run begins from first weights",
    ),
    "a batch in which nothing counts": (
        "--own-data unmasked --guard warn",
        "grad norm: 0.000 | number of skipped iterations:   0 | number of nan iterations:   1 |",
    ),
    "a report that comes later": (
        "--own-data unmasked --own-loss later", "reported later than the rest, and told from here on: nothing",
    ),
    "evaluation of nothing": (
        "--skip-train --eval-iters 1", "--skip-train without a checkpoint: what is evaluated are first weights",
    ),
    "attention that drops": (
        "--attention-dropout 0.1", "holds scores of all pairs of positions; --attention-dropout 0 has it fused",
    ),
    "nothing on storage before the end": (
        "--save {base}/rare",
        "no --save-interval: steps are kept in memory, and on storage at the end, at a drain or a signal only",
    ),
    "no place for progress": (
        "--log-progress", "--log-progress has no effect: its file is in the folder of --save",
    ),
    "finetuning": (TUNED, "weights of step 1 in {base}/imported"),
}  # fmt: skip
"""Arguments, and what is said on the way of runs that end well."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told(base: Path) -> dict[str, Any]:
    """Of each run, by its name."""
    shutil.copytree(MODELS / "llama", base / "llama")
    weights, _ = reading.read(base / "llama", divisible_by=128)
    save_model(str(base / "imported"), weights, step=1)
    (base / "megatron").mkdir()
    (base / "megatron" / "latest_checkpointed_iteration.txt").write_text("1000")
    every = (
        {"first": (SAVED, ""), "large": (f"{SAVED} {LARGE}", ""), "unsaved": (LARGE, "")}
        | SAID
        | REFUSED
    )  # the first is there before
    return tiny.told(base, {name: more for name, (more, _) in every.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str, base: Path, told: dict[str, Any]) -> None:
    found = told[name]
    assert found["status"] == 2, found["text"]
    assert REFUSED[name][1].replace("{base}", str(base)) in found["text"].splitlines()[-1], found[
        "text"
    ]


@pytest.mark.parametrize("name", SAID)
def test_what_may_be_meant_is_said(name: str, base: Path, told: dict[str, Any]) -> None:
    found = told[name]
    assert found["status"] == 0, found["text"]
    said = SAID[name][1].replace("{base}", str(base))
    assert any(line.endswith(said) for line in found["text"].splitlines()), found["text"]


def test_more_memory_than_there_is_is_one_line(told: dict[str, Any]) -> None:
    for name, end in (("large", "; the last checkpoint is kept"), ("unsaved", "size above 1")):
        found = told[name]
        assert found["status"] == 1, found["text"]
        last = found["text"].splitlines()[-1]
        said = "CPU out of memory (rank 0): 59604.64 GiB were asked for; lower --micro-batch"
        assert last.startswith(said)
        assert last.endswith(end)
        assert "or start more ranks and raise --tensor-model-parallel-size" in last
        assert "Traceback" not in found["text"]


def test_a_run_that_was_made_shorter_is_evaluated(told: dict[str, Any]) -> None:
    for name in ("validation", "test"):
        said = f"validation loss at iteration 3 on {name} set | lm loss"
        assert said in told["more than finished"]["text"]


def test_weights_that_diverged_are_no_checkpoint(base: Path, told: dict[str, Any]) -> None:
    del told
    found = load_model(opened(str(base / "diverged"))).state_dict()
    assert all(one.isfinite().all() for one in found.values())


def test_finetuning_begins_from_what_was_imported(base: Path, told: dict[str, Any]) -> None:
    """With a learning rate of 0 it ends there, too; made-up words and the optimizer's state included."""
    del told
    wanted = load_model(opened(str(base / "imported"))).state_dict()
    found = load_model(opened(str(base / "tuned"))).state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def test_another_order_of_sums_in_a_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{tiny.SMALL} --tensor-model-parallel-size 2"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *flags.split()])
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    provide: Any = None  # it does not come to these
    with pytest.raises(SystemExit) as ended:
        pretrain(provide, provide, None, provide)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        "NCCL_ALGO=NVLS may add up in another order each time"
    )


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(parser: ArgumentParser) -> ArgumentParser:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt"])
    provide: Any = None  # it does not come to these
    with pytest.raises(SystemExit) as ended:
        pretrain(provide, provide, None, provide, extra_args_provider=pressed)
    assert ended.value.code == 130

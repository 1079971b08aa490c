"""Every accepted argument changes something that is computed from the settings, or has no effect and says so."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elastic.trainer.arguments.parse import parse
from elastic.trainer.arguments.settings import Settings, subjects
from elastic.trainer.arguments.unused import UNUSED
from elastic.trainer.data import tokenizers
from elastic.trainer.data.gpt_dataset import asked
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.run import loss_scale
from elastic.trainer.watch.guard import Seen, State, gone_back, judge

View = Callable[[Settings], Any]

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 100 --lr 0.1"
)
DATA = "--mock-data --vocab-size 100"
PP = "--pipeline-model-parallel-size 2"
TP = "--tensor-model-parallel-size 2"


def config(settings: Settings) -> Any:
    return settings.config(vocab_size=128)


def weights(settings: Settings) -> Any:
    model = GPT(config(settings))
    initialize(model, model.config, settings.model.seed, settings.model.init_method_std)
    return next(model.parameters()).tolist()


def layout(settings: Settings) -> Any:
    return settings.parallel()


def batches(settings: Settings) -> Any:
    return settings.schedules.batch_sizes(), settings.schedules.leaves()


def rates(settings: Settings) -> Any:
    rate = settings.schedules.learning_rate()
    return [rate.at(consumed) for consumed in range(0, 1000, 7)]


def decays(settings: Settings) -> Any:
    decay = settings.schedules.decay_of_weights()
    return [decay.at(consumed) for consumed in range(0, 1000, 100)]


def steps(settings: Settings) -> Any:
    return settings.schedules.steps()


def precision(settings: Settings) -> Any:
    return settings.optimizer.precision, settings.parallel().compute


def scales(settings: Settings) -> Any:
    """Loss scales of steps that overflow at first, and then not."""
    policy = settings.optimizer.loss_scaling()
    assert policy is not None
    state, found = loss_scale.first(policy), []
    for step in range(60):
        found.append(state.scale)
        state = loss_scale.after(state, policy, overflowed=step < 40)
    return found


def samples_asked(settings: Settings) -> Any:
    evaluation = settings.evaluation
    return asked(
        800, train_iters=100, eval_interval=evaluation.eval_interval,
        eval_iters=evaluation.eval_iters, global_batch_size=8,
    )  # fmt: skip


def words(settings: Settings) -> Any:
    found = tokenizers.build(settings.tokenizer)
    divisor = settings.tokenizer.make_vocab_size_divisible_by
    return type(found), found.vocab_size, tokenizers.padded(found.vocab_size, divisor)


def verdicts(settings: Settings) -> Any:
    """On a run with spikes, sudden falls, NaN and an odd gradient."""
    state, found = State(), []
    for number in range(1, 400):
        loss = 2 + math.sin(number * 12.9898) * 0.05
        loss += {90: 0.9, 180: -0.9}.get(number % 200, 0)
        loss = math.nan if number in (40, 310, 320) else loss
        norm = math.exp(6.0 if number == 260 else math.sin(number * 78.233) * 0.3)
        places = ((number - 1) * 8, number * 8)
        seen = Seen(iteration=number, places=places, loss=loss, grad_norm=norm)
        state, verdict = judge(state, seen, settings.guard)
        found.append(str(verdict))
        if verdict is not None and verdict.action == "rollback":
            state = gone_back(state, state, verdict, settings.guard)
    return found


VISIBLE: Mapping[str, tuple[View, str, str]] = {
    "num_layers": (config, "", "--num-layers 5"),
    "hidden_size": (config, "", "--hidden-size 128"),
    "num_attention_heads": (config, "", "--num-attention-heads 8"),
    "ffn_hidden_size": (config, "", "--ffn-hidden-size 96"),
    "kv_channels": (config, "", "--kv-channels 8"),
    "group_query_attention": (config, "", "--group-query-attention"),
    "num_query_groups": (config, "--group-query-attention", "--num-query-groups 2"),
    "max_position_embeddings": (config, "", "--max-position-embeddings 64"),
    "position_embedding_type": (config, "", "--position-embedding-type none"),
    "rotary_base": (config, "", "--rotary-base 500000"),
    "rotary_percent": (config, "", "--rotary-percent 0.5"),
    "normalization": (config, "", "--normalization RMSNorm"),
    "norm_epsilon": (config, "", "--norm-epsilon 1e-6"),
    "swiglu": (config, "", "--swiglu"),
    "add_bias_linear": (config, "", "--disable-bias-linear"),
    "add_qkv_bias": (config, "--disable-bias-linear", "--add-qkv-bias"),
    "untie_embeddings_and_output_weights": (config, "", "--untie-embeddings-and-output-weights"),
    "init_method_std": (weights, "", "--init-method-std 0.01"),
    "seq_length": (config, "", "--seq-length 48"),
    "global_batch_size": (batches, "", "--global-batch-size 16"),
    "micro_batch_size": (batches, "", "--micro-batch-size 4"),
    "rampup_batch_size": (batches, "", "--rampup-batch-size 2 2 100"),
    "train_iters": (steps, "", "--train-iters 50"),
    "lr": (rates, "", "--lr 0.2"),
    "min_lr": (rates, "", "--min-lr 0.01"),
    "lr_decay_style": (rates, "", "--lr-decay-style cosine"),
    "lr_decay_iters": (rates, "", "--lr-decay-iters 80"),
    "lr_warmup_fraction": (rates, "", "--lr-warmup-fraction 0.1"),
    "lr_warmup_iters": (rates, "", "--lr-warmup-iters 10"),
    "lr_warmup_init": (rates, "--lr-warmup-iters 10", "--lr-warmup-init 0.05"),
    "lr_wsd_decay_style": (
        rates, "--lr-decay-style WSD --lr-wsd-decay-iters 20", "--lr-wsd-decay-style linear",
    ),
    "lr_wsd_decay_iters": (
        rates, "--lr-decay-style WSD --lr-wsd-decay-iters 20", "--lr-wsd-decay-iters 30",
    ),
    "weight_decay": (decays, "", "--weight-decay 0.1"),
    "start_weight_decay": (
        decays,
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--start-weight-decay 0.1",
    ),
    "end_weight_decay": (
        decays,
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--end-weight-decay 0.5",
    ),
    "weight_decay_incr_style": (
        decays,
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--weight-decay-incr-style cosine",
    ),
    "bf16": (precision, "", "--bf16"),
    "fp16": (precision, "", "--fp16"),
    "tensor_model_parallel_size": (layout, "", TP),
    "pipeline_model_parallel_size": (layout, "", PP),
    "sequence_parallel": (layout, TP, "--sequence-parallel"),
    "num_layers_per_virtual_pipeline_stage": (
        layout, PP, "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "num_virtual_stages_per_pipeline_rank": (
        layout, PP, "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "pipeline_schedule": (layout, PP, "--pipeline-schedule gpipe"),
    "use_distributed_optimizer": (layout, "", "--use-distributed-optimizer"),
    "data_parallel_sharding_strategy": (
        layout, "", "--data-parallel-sharding-strategy optim_grads_params",
    ),
    "zero_stage": (layout, "", "--zero-stage 2"),
    "reduction": (layout, "", "--reduction fast"),
    "hidden_dropout": (config, "", "--hidden-dropout 0.2"),
    "attention_dropout": (config, "", "--attention-dropout 0.2"),
    "recompute_granularity": (layout, "", "--recompute-granularity full"),
    "recompute_method": (layout, "--recompute-granularity full", "--recompute-method block"),
    "recompute_num_layers": (layout, "--recompute-method block", "--recompute-num-layers 2"),
    "attention_backend": (layout, "", "--attention-backend unfused"),
    "compile": (layout, "", "--compile"),
    "offload": (layout, "", "--offload all"),
    "initial_loss_scale": (scales, "--fp16", "--initial-loss-scale 1024"),
    "min_loss_scale": (scales, "--fp16", "--min-loss-scale 65536"),
    "loss_scale_window": (scales, "--fp16", "--loss-scale-window 3"),
    "hysteresis": (scales, "--fp16", "--hysteresis 3"),
    "eval_interval": (samples_asked, "", "--eval-interval 10"),
    "eval_iters": (samples_asked, "", "--eval-iters 7"),
    "vocab_size": (words, "", "--vocab-size 200"),
    "make_vocab_size_divisible_by": (words, "", "--make-vocab-size-divisible-by 16"),
    "guard": (verdicts, "", "--guard warn"),
    "guard_window": (verdicts, "--guard rollback", "--guard-window 16"),
    "guard_warmup": (verdicts, "--guard rollback", "--guard-warmup 16"),
    "guard_spike": (verdicts, "--guard rollback", "--guard-spike 1000"),
    "guard_fall": (verdicts, "--guard rollback", "--guard-fall 1000"),
    "guard_norm": (verdicts, "--guard rollback", "--guard-norm 1000"),
    "guard_patience": (verdicts, "--guard rollback", "--guard-patience 1"),
    "guard_rollbacks": (verdicts, "--guard rollback", "--guard-rollbacks 1"),
}  # fmt: skip
"""By field: what shows it, what it is beside, and the argument that changes what is seen."""

IN_SAMPLES = (
    "step_batch_size_schedule", "train_samples", "lr_decay_samples", "lr_warmup_samples",
    "lr_wsd_decay_samples",
)  # fmt: skip
"""Shown by `test_a_run_counted_in_samples`."""

DATASETS: Mapping[str, str] = {
    "data_path": "--data-path {b} --split 8,1,1",
    "split": "--data-path {a} --split 5,4,1",
    "train_data_path": "--train-data-path {b} --valid-data-path {a} --test-data-path {a}",
    "valid_data_path": "--train-data-path {a} --valid-data-path {b} --test-data-path {a}",
    "test_data_path": "--train-data-path {a} --valid-data-path {a} --test-data-path {b}",
    "multiple_validation_sets": "--train-data-path {a} --valid-data-path {a} {b} "
    "--test-data-path {a} --multiple-validation-sets",
    "validation_set_names": "--train-data-path {a} --valid-data-path {a} {b} "
    "--test-data-path {a} --multiple-validation-sets --validation-set-names x y",
    "mock_data": "--mock-data",
    "seed": "--data-path {a} --split 8,1,1 --seed 7",
    "eod_mask_loss": "--data-path {a} --split 8,1,1 --eod-mask-loss",
    "reset_position_ids": "--data-path {a} --split 8,1,1 --reset-position-ids",
    "data_cache_path": "--data-path {a} --split 8,1,1 --data-cache-path {c}",
}
"""In test_effects_data.py: all different from one another, and from `--data-path {a} --split 8,1,1`."""

BOARD = "--log-interval 2 --tensorboard-dir {}/t"
TOLD: Mapping[str, tuple[str, str]] = {
    "log_interval": ("--log-interval 4", "--log-interval 2"),
    "log_throughput": ("--log-interval 2", "--log-throughput"),
    "log_mfu": ("--log-interval 2", "--log-mfu"),
    "device_peak_tflops": ("--log-interval 2 --log-mfu", "--device-peak-tflops 100"),
    "wandb_project": ("--log-interval 2 --wandb-exp-name e", "--wandb-project p"),
    "wandb_exp_name": ("--wandb-project p --wandb-exp-name e", "--wandb-exp-name f"),
    "wandb_entity": ("--wandb-project p --wandb-exp-name e", "--wandb-entity t"),
    "wandb_save_dir": ("--wandb-project p --wandb-exp-name e", "--wandb-save-dir w"),
    "tensorboard_queue_size": (BOARD, "--tensorboard-queue-size 3"),
    "metrics_file": ("--log-interval 2", "--metrics-file {}/m.jsonl"),
    "tensorboard_dir": ("--log-interval 2", "--tensorboard-dir {}/t"),
    "tensorboard_log_interval": (BOARD, "--tensorboard-log-interval 2"),
    "log_timers_to_tensorboard": (BOARD, "--log-timers-to-tensorboard"),
    "log_validation_ppl_to_tensorboard": (BOARD, "--log-validation-ppl-to-tensorboard"),
    "log_loss_scale_to_tensorboard": (BOARD, "--no-log-loss-scale-to-tensorboard"),
    "log_world_size_to_tensorboard": (BOARD, "--log-world-size-to-tensorboard"),
}
"""What it is beside, and what changes it, in test_effects_told.py; {} is a folder."""

PROFILED = (
    "--use-pytorch-profiler --tensorboard-dir {own}/t --profile-step-start 0 --profile-step-end 2"
)
RUNS: Mapping[str, tuple[str, str]] = {
    "adam_beta1": ("", "--adam-beta1 0.5"),
    "adam_beta2": ("", "--adam-beta2 0.5"),
    "adam_eps": ("", "--adam-eps 1"),
    "clip_grad": ("", "--clip-grad 0.01"),
    "loss_scale": ("--fp16 --initial-loss-scale 1024", "--loss-scale 1e9"),
    "save": ("", "--save {own}/s"),
    "save_interval": ("--save {own}/s", "--save-interval 1"),
    "keep": ("--save {own}/s --save-interval 1", "--keep 1"),
    "load": ("", "--load {base}/saved"),
    "ckpt_step": ("--load {base}/saved", "--ckpt-step 1"),
    "finetune": ("--load {base}/saved", "--finetune"),
    "no_load_optim": ("--load {base}/saved --ckpt-step 1", "--no-load-optim"),
    "exit_on_missing_checkpoint": ("--load {own}/none", "--exit-on-missing-checkpoint"),
    "exit_interval": ("", "--exit-interval 2"),
    "exit_duration_in_mins": ("", "--exit-duration-in-mins 1e-9"),
    "full_validation": ("--eval-iters 1 --eval-interval 1", "--full-validation"),
    "skip_train": ("--eval-iters 1", "--skip-train"),
    "profile": ("", f"--profile {PROFILED}"),
    "profile_step_start": (f"--profile {PROFILED}", "--profile-step-start 1"),
    "profile_step_end": (f"--profile {PROFILED}", "--profile-step-end 3"),
    "profile_ranks": (f"--profile {PROFILED}", "--profile-ranks 1"),
}
"""What it is beside, and what changes it, in test_effects_run.py; {own} is a folder of the run's, {base}
of all of them."""

ELSEWHERE: Mapping[str, str] = {
    "tokenizer_type": "data/test_tokenizers.py::test_ids_as_text",
    "vocab_file": "data/test_tokenizers.py::test_files_that_do_not_fit_are_named",
    "merge_file": "data/test_tokenizers.py::test_files_that_do_not_fit_are_named",
    "tokenizer_model": "data/test_tokenizers.py::test_hugging_faces_files_are_read_with_what_ends_a_document",
    "timing_log_level": "test_watching.py::test_samples_that_spoil_steps_are_left_out_in_any_world",
    "timing_log_option": "watch/test_timers.py::test_what_is_told_of_ranks",
    "trace_phases": "watch/test_phases.py::test_the_clock_that_the_flag_asks_for",
    "object_storage_cache_path": "data/test_remote.py::test_a_run_trains_on_a_url",
    "data_storage_options": "data/test_remote.py::test_it_is_copied_once_and_again_when_it_changes",
    "other_conditions": "test_pretrain.py::test_in_exact_mode_another_layout_has_to_be_asked_for",
    "record_memory_history": "watch/test_gpu.py::test_a_run_tells_of_a_gpus_memory",
    "use_pytorch_profiler": "watch/test_profiler.py::test_nsys_is_for_gpus",
    "memory_snapshot_path": "watch/test_gpu.py::test_a_run_tells_of_a_gpus_memory",
    "log_memory_to_tensorboard": "watch/test_gpu.py::test_a_run_tells_of_a_gpus_memory",
    "num_workers": "data/test_loader.py::test_batches_come_in_the_order_of_their_numbers",
    "log_params_norm": "test_watching.py::test_samples_that_spoil_steps_are_left_out_in_any_world",
    "log_num_zeros_in_grad": "test_watching.py::test_samples_that_spoil_steps_are_left_out_in_any_world",
    "log_progress": "test_watching.py::test_samples_that_spoil_steps_are_left_out_in_any_world",
    "probe_file": "test_watching.py::test_samples_that_spoil_steps_are_left_out_in_any_world",
    "probe_interval": "test_watching.py::test_samples_that_spoil_steps_are_left_out_in_any_world",
    "data_parallel_size": "arguments/test_parse.py::test_a_world_is_checked_once_it_is_known",
}
"""The test that shows it, of what its subject is given to."""


def run(*more: str) -> Settings:
    return parse(" ".join((BASE, DATA, *more)).split())


@pytest.mark.parametrize("name", VISIBLE)
def test_an_argument_changes_what_is_computed_from_it(name: str) -> None:
    view, beside, changed = VISIBLE[name]
    assert view(run(beside)) != view(run(beside, changed))


def test_a_run_counted_in_samples() -> None:
    base = BASE.replace("--train-iters 100", "--train-samples 805")

    def counted(more: str = "", base: str = base) -> Settings:
        return parse(f"{base} {DATA} {more}".split())

    assert steps(counted()) == 100
    assert rates(counted()) != rates(counted("--lr-decay-samples 700"))
    assert rates(counted()) != rates(counted("--lr-warmup-samples 50"))
    wsd = "--lr-decay-style WSD --lr-wsd-decay-samples"
    assert rates(counted(f"{wsd} 100")) != rates(counted(f"{wsd} 200"))
    stepwise = base.replace("--global-batch-size 8", "--step-batch-size-schedule")
    found = batches(
        parse([*stepwise.split()[:-4], "0:4 320:8", *stepwise.split()[-4:], *DATA.split()])
    )
    assert found[0].stages == ((0, 4), (10, 8))


@pytest.mark.parametrize("name", UNUSED)
def test_what_has_no_effect_changes_nothing_and_is_said(name: str) -> None:
    one = UNUSED[name]
    for flag in one.flags(name):
        said = f"{flag} {(one.only or ('w',))[0]}" if one.words else flag
        found = run(said)
        assert [note for note in found.notes if one.why in note]
        assert {kind: getattr(found, kind) for kind in subjects()} == {
            kind: getattr(run(), kind) for kind in subjects()
        }


def test_every_argument_is_in_one_of_the_tables() -> None:
    accepted = {one.name for kind in subjects().values() for one in fields(kind)}
    tables = (VISIBLE, IN_SAMPLES, DATASETS, TOLD, RUNS, ELSEWHERE)
    listed = [name for table in tables for name in table]
    assert accepted - set(listed) == set(), "say in a table of this file what shows their effect"
    assert set(listed) - accepted == set(), "these are no arguments"
    assert len(listed) == len(set(listed)), "one table is enough"
    tests = Path(__file__).parents[1]
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        assert f"def {test}(" in (tests / file).read_text()


def test_another_spelling_means_the_same() -> None:
    values = {
        name: said for name, (_, beside, more) in VISIBLE.items() for said in [f"{beside} {more}"]
    }
    values |= {name: f"{beside} {more}" for name, (beside, more) in (*TOLD.items(), *RUNS.items())}
    for kind in subjects().values():
        for one in fields(kind):
            flag = "--" + one.name.replace("_", "-")
            for other in one.metadata.get("also", ()):
                assert run(values[one.name]) == run(values[one.name].replace(flag, other))
            for other, value in one.metadata.get("meaning", {}).items():
                assert run(other) == run(f"{flag} {value}") != run()
            for other in one.metadata.get("off", ()):
                assert run(other) == run(f"{flag} false") != run()

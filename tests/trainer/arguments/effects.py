"""Which effect of a run shows each accepted argument: `observed.py` looks for it, `test_effects.py` compares."""

from collections.abc import Mapping
from typing import NamedTuple


class Shown(NamedTuple):
    """How an argument is shown."""

    views: str
    """What of a run differs, all of it: names of `observed.py`."""
    beside: str
    """What it is beside."""
    more: str
    """The argument that changes what is seen."""
    world: int = 1
    rank: int = 0


LONGER = "--train-iters 8"
OPS = "COUNTED"
"""For `observed.py`: what torch computes is counted, too."""
RISES = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
WSD = "--train-iters 8 --lr-decay-style WSD --lr-wsd-decay-iters 6"
SAMPLES = "--train-iters 3 --train-samples"
DATA = "--mock-data false --vocab-size 100"
SPLIT = f"{DATA} --data-path {{base}}/a --split 8,1,1"
EACH = (
    f"{DATA} --train-data-path {{base}}/a --valid-data-path {{base}}/a --test-data-path {{base}}/a "
    "--eval-iters 1"
)
SETS = f"{DATA} --train-data-path {{base}}/a --valid-data-path {{base}}/a {{base}}/b --eval-iters 1"
URL = f"{DATA} --data-path dir://a --split 1 --object-storage-cache-path {{own}}/o"
WORDS = (
    "--vocab-file {base}/vocab.json --merge-file {base}/merges.txt --make-vocab-size-divisible-by 1"
)
FP16 = "--fp16 --train-iters 10"
SMALL_SCALE = f"{FP16} --initial-loss-scale 1024"
GUARDED = "--guard rollback --guard-window 20 --guard-warmup 20 --train-iters 37 --log-interval 37"
ONE_STAGE = "--num-layers 4 --pipeline-model-parallel-size 2"
BOARD = "--train-iters 4 --tensorboard-dir {own}/t"
WANDB = "--wandb-project p --wandb-exp-name e"
STORED = "--save {own}/s --save-interval 1"
EVALUATED = "--train-iters 5 --eval-interval 2 --eval-iters 1"
PROFILED = (
    "--use-pytorch-profiler --tensorboard-dir {own}/t --profile-step-start 0 --profile-step-end 2"
)
PROBED = "--train-iters 4 --probe-file {base}/probes"

SHOWN: Mapping[str, Shown] = {
    # The model.
    "num_layers": Shown("weights losses", "", "--num-layers 2"),
    "hidden_size": Shown("weights losses", "", "--hidden-size 32"),
    "num_attention_heads": Shown("losses", "", "--num-attention-heads 4"),
    "ffn_hidden_size": Shown("weights losses", "", "--ffn-hidden-size 96"),
    "kv_channels": Shown("weights losses", "", "--kv-channels 4"),
    "group_query_attention": Shown("weights losses", "", "--group-query-attention"),
    "num_query_groups": Shown("weights losses", "--group-query-attention", "--num-query-groups 2"),
    "max_position_embeddings": Shown("weights", "", "--max-position-embeddings 64"),
    "position_embedding_type": Shown("weights losses", "", "--position-embedding-type none"),
    "rotary_base": Shown("losses", "--position-embedding-type rope", "--rotary-base 100"),
    "rotary_percent": Shown("losses", "--position-embedding-type rope", "--rotary-percent 0.5"),
    "normalization": Shown("weights losses", "", "--normalization RMSNorm"),
    "norm_epsilon": Shown("losses", "", "--norm-epsilon 0.1"),
    "swiglu": Shown("weights losses", "", "--swiglu"),
    "add_bias_linear": Shown("weights losses", "", "--disable-bias-linear"),
    "add_qkv_bias": Shown("weights losses", "--disable-bias-linear", "--add-qkv-bias"),
    "untie_embeddings_and_output_weights": Shown(
        "weights losses", "", "--untie-embeddings-and-output-weights"
    ),
    "init_method_std": Shown("first losses", "", "--init-method-std 0.01"),
    "hidden_dropout": Shown("losses", "", "--hidden-dropout 0.2"),
    "attention_dropout": Shown("losses", "", "--attention-dropout 0.2"),
    "seed": Shown("first data losses", "--hidden-dropout 0.2", "--seed 7"),
    # Lengths, batches and rates.
    "seq_length": Shown("leaves data", "", "--seq-length 8"),
    "global_batch_size": Shown("trained batches", "", "--global-batch-size 8"),
    "micro_batch_size": Shown("leaves", "", "--micro-batch-size 4"),
    "rampup_batch_size": Shown("trained batches", "", "--rampup-batch-size 2 2 4"),
    "step_batch_size_schedule": Shown(
        "trained batches", "--no-batch --step-batch-size-schedule 0:4",
        "--step-batch-size-schedule 0:2",
    ),
    "train_iters": Shown("trained batches", "", "--train-iters 4"),
    "train_samples": Shown("trained batches", "--in-samples 13", "--train-samples 16"),
    "lr": Shown("rates losses", "", "--lr 0.2"),
    "min_lr": Shown("rates losses", "", "--min-lr 0.009"),
    "lr_decay_style": Shown("rates", LONGER, "--lr-decay-style cosine"),
    "lr_decay_iters": Shown("rates", LONGER, "--lr-decay-iters 6"),
    "lr_decay_samples": Shown("rates", "--in-samples 13", "--lr-decay-samples 9"),
    "lr_warmup_fraction": Shown("rates", LONGER, "--lr-warmup-fraction 0.5"),
    "lr_warmup_iters": Shown("rates", LONGER, "--lr-warmup-iters 4"),
    "lr_warmup_samples": Shown("rates", "--in-samples 13", "--lr-warmup-samples 6"),
    "lr_warmup_init": Shown("rates", f"{LONGER} --lr-warmup-iters 4", "--lr-warmup-init 0.005"),
    "lr_wsd_decay_style": Shown("rates", WSD, "--lr-wsd-decay-style linear"),
    "lr_wsd_decay_iters": Shown("rates", WSD, "--lr-wsd-decay-iters 3"),
    "lr_wsd_decay_samples": Shown(
        "rates", "--in-samples 32 --lr-decay-style WSD --lr-wsd-decay-samples 24",
        "--lr-wsd-decay-samples 12",
    ),
    "weight_decay": Shown("decays losses", "", "--weight-decay 30"),
    "start_weight_decay": Shown("decays", RISES, "--start-weight-decay 0.1"),
    "end_weight_decay": Shown("decays", RISES, "--end-weight-decay 0.5"),
    "weight_decay_incr_style": Shown("decays", RISES, "--weight-decay-incr-style cosine"),
    # The optimizer, and what is computed in.
    "adam_beta1": Shown("losses", "", "--adam-beta1 0.5"),
    "adam_beta2": Shown("losses", "", "--adam-beta2 0.5"),
    "adam_eps": Shown("losses", "", "--adam-eps 1"),
    "clip_grad": Shown("losses", "--adam-eps 1", "--clip-grad 0.01"),
    "bf16": Shown("kinds losses", "", "--bf16"),
    "fp16": Shown("kinds scales", "", "--fp16"),
    "loss_scale": Shown("scales", SMALL_SCALE, "--loss-scale 512"),
    "initial_loss_scale": Shown("scales", FP16, "--initial-loss-scale 1024"),
    "min_loss_scale": Shown("scales", FP16, "--min-loss-scale 1073741824"),
    "loss_scale_window": Shown("scales", SMALL_SCALE, "--loss-scale-window 3"),
    "hysteresis": Shown("scales", FP16, "--hysteresis 3"),
    # The layout, on fake ranks.
    "tensor_model_parallel_size": Shown("weights", "", "--tensor-model-parallel-size 2", world=2),
    "sequence_parallel": Shown(
        "ops", f"{OPS} --tensor-model-parallel-size 2", "--sequence-parallel", world=2
    ),
    "pipeline_model_parallel_size": Shown(
        "weights actions", "--num-layers 4", "--pipeline-model-parallel-size 2", world=2, rank=1
    ),
    "num_layers_per_virtual_pipeline_stage": Shown(
        "weights actions", ONE_STAGE, "--num-layers-per-virtual-pipeline-stage 1", world=2, rank=1
    ),
    "num_virtual_stages_per_pipeline_rank": Shown(
        "weights actions", ONE_STAGE, "--num-virtual-stages-per-pipeline-rank 2", world=2, rank=1
    ),
    "pipeline_schedule": Shown("actions", ONE_STAGE, "--pipeline-schedule gpipe", world=2, rank=1),
    "data_parallel_size": Shown("status", "--data-parallel-size 2", "--data-parallel-size 1", world=2),
    "use_distributed_optimizer": Shown("ops", OPS, "--use-distributed-optimizer", world=2),
    "data_parallel_sharding_strategy": Shown(
        "ops", f"{OPS} --data-parallel-sharding-strategy optim",
        "--data-parallel-sharding-strategy optim_grads_params", world=2,
    ),
    "zero_stage": Shown("ops", f"{OPS} --zero-stage 1", "--zero-stage 2", world=2),
    "reduction": Shown("ops", OPS, "--reduction fast", world=2),
    "recompute_granularity": Shown("ops", OPS, "--recompute-granularity full"),
    "recompute_method": Shown(
        "ops", f"{OPS} --num-layers 4 --recompute-granularity full", "--recompute-method block"
    ),
    "recompute_num_layers": Shown(
        "ops", f"{OPS} --num-layers 4 --recompute-method block", "--recompute-num-layers 2"
    ),
    "attention_backend": Shown("ops", OPS, "--attention-backend unfused"),
    "compile": Shown("graphs", "", "--compile"),
    "offload": Shown("holders", "", "--offload all"),
    # Data.
    "data_path": Shown("data losses", SPLIT, "--data-path {base}/b"),
    "split": Shown("data asked", f"{SPLIT} --eval-iters 1", "--split 5,4,1 --eval-iters 2"),
    "train_data_path": Shown("data losses", EACH, "--train-data-path {base}/b"),
    "valid_data_path": Shown("data text", EACH, "--valid-data-path {base}/b"),
    "test_data_path": Shown("data text", EACH, "--test-data-path {base}/b"),
    "multiple_validation_sets": Shown("data text", SETS, "--multiple-validation-sets"),
    "validation_set_names": Shown(
        "text", f"{SETS} --multiple-validation-sets", "--validation-set-names x y"
    ),
    "mock_data": Shown("status losses", "--mock-data false", "--mock-data"),
    "data_cache_path": Shown("files", SPLIT, "--data-cache-path {own}/i"),
    "object_storage_cache_path": Shown(
        "files", f'{URL} --data-storage-options {{"path":"BASE","target_protocol":"file"}}',
        "--object-storage-cache-path {own}/p",
    ),
    "data_storage_options": Shown(
        "data losses", f'{URL} --data-storage-options {{"path":"BASE","target_protocol":"file"}}',
        '--data-storage-options {"path":"BASE/c","target_protocol":"file"}',
    ),
    "eod_mask_loss": Shown("data losses", SPLIT, "--eod-mask-loss"),
    "reset_position_ids": Shown("data positions losses", SPLIT, "--reset-position-ids"),
    "num_workers": Shown("readers", EVALUATED, "--num-workers 3"),
    "tokenizer_type": Shown("weights", WORDS, "--tokenizer-type NullTokenizer"),
    "vocab_file": Shown("weights", WORDS, "--vocab-file {base}/more.json"),
    "merge_file": Shown("ids", WORDS, "--merge-file {base}/fewer.txt"),
    "tokenizer_model": Shown(
        "ends", "--tokenizer-model {base}/words", "--tokenizer-model {base}/others"
    ),
    "vocab_size": Shown("weights", "", "--vocab-size 200"),
    "make_vocab_size_divisible_by": Shown("weights", "", "--make-vocab-size-divisible-by 100"),
    # Evaluation, and where it is kept.
    "eval_interval": Shown("evaluated asked", EVALUATED, "--eval-interval 1"),
    "eval_iters": Shown("evaluated asked", EVALUATED, "--eval-iters 2"),
    "full_validation": Shown("evaluated", EVALUATED, "--full-validation"),
    "skip_train": Shown("trained", EVALUATED, "--skip-train"),
    "save": Shown("files", "", "--save {own}/s"),
    "save_interval": Shown("files", "--save {own}/s", "--save-interval 1"),
    "keep": Shown("files", STORED, "--keep 1"),
    "load": Shown("first losses", "--train-iters 4", "--load {base}/saved"),
    "ckpt_step": Shown("trained losses", "--load {base}/saved", "--ckpt-step 1"),
    "finetune": Shown("trained losses", "--load {base}/saved", "--finetune"),
    "no_load_optim": Shown("losses", "--load {base}/saved --ckpt-step 1", "--no-load-optim"),
    "exit_on_missing_checkpoint": Shown(
        "status", "--load {own}/none", "--exit-on-missing-checkpoint"
    ),
    "other_conditions": Shown(
        "status trained", "--save {copy} --train-iters 4 --micro-batch-size 1", "--other-conditions"
    ),
    "exit_interval": Shown("trained", "", "--exit-interval 2"),
    "exit_duration_in_mins": Shown("trained", "", "--exit-duration-in-mins 1e-9"),
    # What is told.
    "log_interval": Shown("text", LONGER, "--log-interval 2"),
    "log_throughput": Shown("text", "", "--log-throughput"),
    "log_params_norm": Shown("text", "", "--log-params-norm"),
    "log_num_zeros_in_grad": Shown("text", "", "--log-num-zeros-in-grad"),
    "log_progress": Shown("files", "--save {own}/s", "--log-progress"),
    "log_mfu": Shown("text", "", "--log-mfu"),
    "device_peak_tflops": Shown("text", "--log-mfu", "--device-peak-tflops 1e-6"),
    "timing_log_level": Shown("text", "--timing-log-level 1", "--timing-log-level 2"),
    "timing_log_option": Shown("text", "--timing-log-level 1", "--timing-log-option all"),
    "tensorboard_dir": Shown("files board", "", "--tensorboard-dir {own}/t"),
    "tensorboard_log_interval": Shown("board", BOARD, "--tensorboard-log-interval 2"),
    "tensorboard_queue_size": Shown("queues", BOARD, "--tensorboard-queue-size 3"),
    "log_timers_to_tensorboard": Shown(
        "board timed", f"{BOARD} --timing-log-level 1", "--log-timers-to-tensorboard"
    ),
    "log_validation_ppl_to_tensorboard": Shown(
        "board", f"{BOARD} --eval-iters 1 --eval-interval 2", "--log-validation-ppl-to-tensorboard"
    ),
    "log_loss_scale_to_tensorboard": Shown("board", BOARD, "--no-log-loss-scale-to-tensorboard"),
    "log_world_size_to_tensorboard": Shown("board", BOARD, "--log-world-size-to-tensorboard"),
    "wandb_project": Shown("wandb", "--wandb-exp-name e", "--wandb-project p"),
    "wandb_exp_name": Shown("wandb", WANDB, "--wandb-exp-name f"),
    "wandb_entity": Shown("wandb", WANDB, "--wandb-entity t"),
    "wandb_save_dir": Shown("wandb", WANDB, "--wandb-save-dir w"),
    "metrics_file": Shown("metrics", "", "--metrics-file {own}/m.jsonl"),
    "trace_phases": Shown("files text", "", "--trace-phases {own}/traces"),
    "profile": Shown("profiled", PROFILED, "--profile"),
    "use_pytorch_profiler": Shown(
        "status profiled", "--profile --tensorboard-dir {own}/t --profile-step-start 0",
        "--use-pytorch-profiler",
    ),
    "profile_step_start": Shown("files", f"--profile {PROFILED}", "--profile-step-start 1"),
    "profile_step_end": Shown("files profiled", f"--profile {PROFILED}", "--profile-step-end 3"),
    "profile_ranks": Shown("files", f"--profile {PROFILED}", "--profile-ranks 1"),
    "probe_file": Shown("text", "--train-iters 4 --probe-interval 2", "--probe-file {base}/probes"),
    "probe_interval": Shown("text", f"{PROBED} --probe-interval 2", "--probe-interval 1"),
    "check_weight_hash_across_dp_replicas_interval": Shown(
        "ops text", OPS, "--check-weight-hash-across-dp-replicas-interval 2", world=2
    ),
    # The guard.
    "guard": Shown("verdicts", GUARDED, "--guard warn"),
    "guard_window": Shown("verdicts", GUARDED, "--guard-window 16"),
    "guard_warmup": Shown("verdicts", GUARDED, "--guard-warmup 27"),
    "guard_spike": Shown("verdicts", GUARDED, "--guard-spike 1000"),
    "guard_fall": Shown("verdicts", GUARDED, "--guard-fall 1000"),
    "guard_norm": Shown("verdicts", GUARDED, "--guard-norm 1000"),
    "guard_patience": Shown("verdicts", GUARDED, "--guard-patience 1"),
    "guard_rollbacks": Shown("verdicts", GUARDED, "--guard-rollbacks 1"),
}  # fmt: skip
"""By field."""

BEGINS_ILL = ("mock_data", "other_conditions", "use_pytorch_profiler")
"""Of these, what the argument is beside is refused."""
ENDS_ILL = ("exit_on_missing_checkpoint", "data_parallel_size")
"""And of these, what it changes."""

ELSEWHERE: Mapping[str, str] = {
    "record_memory_history": "watch/test_gpu.py::test_a_run_tells_of_a_gpus_memory",
    "memory_snapshot_path": "watch/test_gpu.py::test_a_run_tells_of_a_gpus_memory",
    "log_memory_to_tensorboard": "watch/test_gpu.py::test_a_run_tells_of_a_gpus_memory",
}
"""Those that a GPU shows, and the test that gives them."""

"""Megatron's arguments that are refused, by name, with the nearest that there is. Pure.

The names are those of Megatron-LM's `arguments.py` from 0.7 to 2026, and of its example YAML.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

ALIKE = 0.7
"""difflib's measure, of names without their dashes: below it a name is another word, and no misspelling."""

_LATER = "comes later"
_EXPERTS = f"mixture of experts {_LATER}"
_CONTEXT = f"context parallelism {_LATER}; longer sequences fit with --sequence-parallel"
_FP8 = f"fp8 {_LATER}: take --bf16"
_OTHER_MODEL = "there is one model here, a decoder: see --help for its shapes"
_KERNELS = "which kernels are fused is torch's choice: see --compile and --attention-backend"
_OVERLAP = "what overlaps is FSDP2's choice and the pipeline schedule's: leave it out"
_CHECKPOINT = (
    "checkpoints are elastic.checkpoint's, whole for any layout: see --save, --load, --keep"
)
_MEMORY = "every step is kept in memory, on a peer too: see elastic-run and --save-interval"
_LAUNCHER = "elastic-run finds and replaces failed, hung and slow ranks: leave it out"
_GENERATE = "this is training: see elasticctl generate"
_RL = "there is pre-training only"
_ADAM = "AdamW is the one optimizer: see --adam-beta1, --adam-beta2, --adam-eps"
_STATE = (
    "parameters and AdamW's state are fp32: see --zero-stage and --offload where memory is short"
)
_PROFILE = (
    "see --profile and --trace-phases for where time goes, --record-memory-history for memory"
)
_TOKENIZER = "see --tokenizer-type, --vocab-file and --merge-file, or --tokenizer-model"
_DATA = "see --data-path, --train-data-path and --mock-data"
_STAGES = "stages have as many layers as can be: see --num-virtual-stages-per-pipeline-rank"
_EMBED = "see --position-embedding-type, --rotary-base and --rotary-percent"
_GRADIENTS = "see --reduction for how gradients are added up"
_INTERNAL = "it is no argument of Megatron's command line: leave it out of the file"

_REASONS: tuple[tuple[str, str], ...] = (
    (_EXPERTS, """
        num-experts num-moe-experts expert-model-parallel-size expert-tensor-parallel-size moe-*
        overlap-moe-expert-parallel-comm delay-wgrad-compute ep-overlap-*
        use-fused-weighted-squared-relu
    """),
    (_CONTEXT, """
        context-parallel-size cp-comm-type hierarchical-context-parallel-sizes
        hybrid-context-parallel max-seqlen-per-dp-cp-rank
    """),
    (_FP8, """
        fp8 fp8-* no-fp8-wgrad fp4 fp4-* first-last-layers-bf16 num-layers-at-start-in-bf16
        num-layers-at-end-in-bf16 keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag
        kitchen-* use-kitchen-attention te-precision-config-file
    """),
    (_OTHER_MODEL, """
        encoder-num-layers decoder-num-layers encoder-seq-length decoder-seq-length
        encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size
        pipeline-model-parallel-split-rank standalone-embedding-stage
        apply-residual-connection-post-layernorm openai-gelu squared-relu quick-geglu
        activation-func activation-func-clamp-value glu-linear-offset gated-linear-unit
        onnx-safe bert-* no-bert-* softmax-type window-size window-attn-skip-freq
        multi-latent-attention q-lora-rank kv-lora-rank qk-* v-head-dim cache-mla-latents mscale
        mscale-all-dim mtp-* attention-output-gate experimental-attention-variant dsa-* linear-*
        heterogeneous-* hybrid-* mamba-* is-hybrid-model disable-mamba-mem-eff-path
        use-mamba-mem-eff-path retro-* retriever-* biencoder-* ict-* titles-data-path
        query-in-block-prob use-one-sent-docs evidence-data-path block-data-path embedding-path
        indexer-* num-classes img-h img-w num-channels patch-dim classes-fraction
        data-per-class-fraction no-data-sharding head-lr-mult vision-* swin-backbone-type mask-*
        iter-per-epoch dino-* short-seq-prob sample-rate vocab-extra-ids output-bert-embeddings
        spec use-legacy-models enable-experimental export-* logits-* cached-logits-*
        apply-query-key-layer-scaling no-query-key-layer-scaling attention-softmax-in-fp32
        fp32-residual-connection fp16-lm-cross-entropy init-method-xavier-uniform
        embedding-init-method-std use-cpu-initialization init-model-with-meta-device
        no-initialization perform-initialization data-parallel-random-init batch-invariant-mode
    """),
    (_EMBED, """
        no-position-embedding add-position-embedding rotary-interleaved
        rotary-seq-len-interpolation-factor rotary-scaling-factor use-rope-scaling
        rope-scaling-factor rope-type no-rope-freq mrope-section relative-attention-num-buckets
        relative-attention-max-distance original-max-position-embeddings beta-fast beta-slow
    """),
    (_KERNELS, """
        no-masked-softmax-fusion masked-softmax-fusion no-bias-gelu-fusion bias-gelu-fusion
        no-bias-swiglu-fusion bias-swiglu-fusion no-bias-dropout-fusion bias-dropout-fusion
        no-rope-fusion apply-rope-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl
        no-persist-layer-norm persist-layer-norm no-gradient-accumulation-fusion
        gradient-accumulation-fusion memory-efficient-layer-norm bias-activation-fusion
        use-te-activation-func flash-decode enable-cuda-graph external-cuda-graph cuda-graph-*
        te-rng-tracker disable-jit-fuser fallback-to-eager-attn transformer-engine-*
        disable-bf16-reduced-precision-matmul deterministic-mode
        clone-scatter-output-in-embedding no-clone-scatter-output-in-embedding
    """),
    (_OVERLAP, """
        tp-comm-* disable-tp-comm-* no-overlap-p2p-communication overlap-p2p-comm
        overlap-p2p-communication-warmup-flush batch-p2p-comm batch-p2p-sync
        use-ring-exchange-p2p no-align-grad-reduce align-grad-reduce no-align-param-gather
        align-param-gather delay-grad-reduce no-delay-grad-reduce delay-param-gather
        overlap-param-gather-with-optimizer-step no-scatter-gather-tensors-in-pipeline
        scatter-gather-tensors-in-pipeline defer-embedding-wgrad-compute wgrad-deferral-limit
        deallocate-pipeline-outputs microbatch-group-size-per-virtual-pipeline-stage
        high-priority-stream-groups create-all-gather-group use-nccl-ub nccl-ub
        disable-symmetric-registration fsdp-manual-registration fsdp-double-buffer
        suggested-communication-unit-size use-sharp sharp-enabled-group symmetric-ar-type
        nccl-communicator-config-path nccl-all-reduce-for-prefill
        pipeline-model-parallel-comm-backend disable-gloo-process-groups
        enable-gloo-process-groups distribute-saved-activations
    """),
    (_GRADIENTS, """
        grad-reduce-in-bf16 ddp-* no-gradient-reduce-div-fusion gradient-reduce-div-fusion
        calculate-per-token-loss num-distributed-optimizer-instances
        enable-full-sharding-in-hsdp outer-dp-sharding-strategy
    """),
    ("data parallelism is FSDP2 at every stage: see --data-parallel-sharding-strategy", """
        use-megatron-fsdp use-torch-fsdp2 use-custom-fsdp torch-fsdp2-no-reshard-after-forward
        megatron-fsdp-*
    """),
    (_STAGES, """
        decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        pipeline-model-parallel-layout account-for-embedding-in-pipeline-split
        account-for-loss-in-pipeline-split num-layers-in-first-pipeline-stage
        num-layers-in-last-pipeline-stage
    """),
    ("replicas are the outermost, and stages and layers within: leave it out", """
        use-tp-pp-dp-mapping
    """),
    ("give --tensor-model-parallel-size", "model-parallel-size"),
    ("give --micro-batch-size and --global-batch-size", "batch-size"),
    ("give --lr-warmup-iters, -samples or -fraction", "warmup"),
    ("the batch never follows the world: padding fills up what replicas leave", """
        decrease-batch-size-if-needed
    """),
    ("--checkpoint-activations and --recompute-granularity say what is computed again", """
        recompute-modules checkpoint-num-layers fine-grained-activation-offloading offload-modules
        min-offloaded-tensor-size cpu-offloading cpu-offloading-*
    """),
    (_STATE, """
        use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype
        exp-avg-sq-dtype store-param-remainders optimizer-offload-fraction
        use-torch-optimizer-for-cpu-offload overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads
        no-pin-cpu-params pin-cpu-grads pin-cpu-params
    """),
    (_ADAM, """
        sgd-momentum muon-* no-decoupled-weight-decay decoupled-weight-decay
        dump-param-to-param-group-map
    """),
    ("all layers have one learning rate: see --lr and --min-lr", "decoupled-lr decoupled-min-lr"),
    ("matrices decay, biases and norms do not: see --weight-decay", """
        no-weight-decay-cond-type apply-wd-to-qk-layernorm
    """),
    ("see --guard for what is done about NaN, spikes and odd gradients", """
        no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss
        check-for-large-grads rerun-mode error-injection-* result-rejected-tracker-filename
        iterations-to-skip
    """),
    (_MEMORY, "non-persistent-* replication replication-* persistent-ckpt-*"),
    (_CHECKPOINT, """
        no-save-optim save-retain-interval save-wgrads-interval save-dgrads-interval
        pretrained-checkpoint
        use-checkpoint-args use-mp-args-from-checkpoint-args
        no-use-tokenizer-model-from-checkpoint-args use-checkpoint-opt-param-scheduler
        load-main-params-from-ckpt
        no-strict-fsdp-dtensor-load strict-fsdp-dtensor-load use-persistent-ckpt-worker
        auto-detect-ckpt-format dist-ckpt-* ckpt-convert-* ckpt-fully-parallel-*
        no-ckpt-fully-parallel-save ckpt-assume-constant-structure
        distrib-optim-fully-reshardable-mem-efficient
    """),
    (_LAUNCHER, """
        inprocess-* enable-ft-package calc-ft-timeouts ft-* log-straggler
        disable-straggler-on-startup straggler-* run-workload-inspector-server
        adlr-autoresume adlr-autoresume-interval flight-recorder-* distributed-timeout-minutes
        distributed-timeout-seconds-after-init lazy-mpu-init
        fake-process-group
    """),
    ("elasticctl drain, and a notice of preemption, end a run at a step, saved: leave it out", """
        exit-signal-handler exit-signal exit-signal-handler-for-dataloader
    """),
    (_PROFILE, """
        pytorch-profiler-* record-shapes nvtx-ranges
        log-energy log-device-memory-used log-memory-interval log-max-attention-logit
        no-barrier-with-level-1-timing barrier-with-L1-time
    """),
    ("TensorBoard has them always", """
        log-batch-size-to-tensorboard log-learning-rate-to-tensorboard
        no-log-learnig-rate-to-tensorboard
    """),
    ("see --tensorboard-dir, --wandb-project and --metrics-file", """
        enable-one-logger no-one-logger one-logger-* app-tag-run-name app-tag-run-version
        config-logger-dir logging-level save-config-filepath
    """),
    (_TOKENIZER, """
        padded-vocab-size tokenizer-* tiktoken-* legacy-tokenizer trust-remote-code
    """),
    (_DATA, """
        data-args-path per-split-data-args-path per-dataset-sequences-path dataloader-type
        dataloader-fast-cache-load dataloader-defer-npy-index-mmap no-mmap-bin-files
        mmap-bin-files fim-* sft sft-* num-dataset-builder-threads mid-level-dataset-surplus
        allow-ambiguous-pad-tokens disable-msc enable-msc s3-cache-path
    """),
    ("attention is causal over the whole sample: see --reset-position-ids and --eod-mask-loss", """
        reset-attention-mask no-create-attention-mask-in-dataloader
        create-attention-mask-in-dataloader
    """),
    (f"training in phases {_LATER}", """
        phase-transition-iterations curriculum-learning
    """),
    (f"the planner {_LATER}: give the layout", "task-type max-global-batch-size"),
    (f"offload to NVMe {_LATER}: give --offload optimizer, or all", "nvme-* offload-to-nvme"),
    (f"rarer synchronisation of replicas {_LATER}", "diloco-* local-sgd-*"),
    ("torch keeps what it has: leave it out", "empty-unused-memory-level train-sync-interval"),
    ("the trainer collects garbage by itself: leave it out", """
        manual-gc manual-gc-interval no-manual-gc-eval manual-gc-eval
    """),
    ("see --full-validation and --eval-iters", "test-mode eval-global-batch-size"),
    (_GENERATE, """
        inference-* max-tokens-to-oom use-legacy-static-engine decode-only-cuda-graphs
        enable-chunked-prefill disable-chunked-prefill mlp-chunks-for-prefill
    """),
    (_RL, "perform-rl-step rl-* grpo-* langrl-* refit-method"),
    (_INTERNAL, """
        init-method output-layer-init-method params-dtype timers finalize-model-grads-func
        pipeline-dtype grad-scale-func enable-autocast autocast-dtype variable-seq-lengths
        num-microbatches-with-partial-activation-checkpoints no-sync-func grad-sync-func
        param-sync-func -cpu-offloading-context
    """),
)  # fmt: skip

_ASKS_NOTHING: Mapping[str, tuple[str, ...]] = {
    "context-parallel-size": ("1",), "expert-model-parallel-size": ("1",),
    "moe-router-load-balancing-type": ("aux_loss",), "moe-router-topk": ("2",),
    "moe-aux-loss-coeff": ("0", "0.0"), "fp8-margin": ("0",), "fp8-interval": ("1",),
    "fp8-amax-history-len": ("1",), "fp8-amax-compute-algo": ("most_recent",),
    "fp8-wgrad": ("true",), "cpu-offloading-num-layers": ("0",),
    "cpu-offloading-activations": ("true",), "vocab-extra-ids": ("0",),
    "retriever-seq-length": ("256",), "sample-rate": ("1.0",), "mask-prob": ("0.15",),
    "short-seq-prob": ("0.1",), "bert-binary-head": ("true",), "sgd-momentum": ("0.9",),
    "one-logger-project": ("megatron-lm",), "enable-one-logger": ("true",),
    "adlr-autoresume-interval": ("1000",), "distributed-timeout-minutes": ("10",),
    "empty-unused-memory-level": ("0",), "manual-gc-interval": ("0",), "manual-gc-eval": ("true",),
    "log-learning-rate-to-tensorboard": ("true",), "check-for-nan-in-loss-and-grad": ("true",),
    "perform-initialization": ("true",), "clone-scatter-output-in-embedding": ("true",),
    "barrier-with-L1-time": ("true",), "delay-grad-reduce": ("true",),
    "scatter-gather-tensors-in-pipeline": ("true",), "batch-p2p-comm": ("true",),
    "batch-p2p-sync": ("true",), "tp-comm-split-ag": ("true",), "tp-comm-split-rs": ("true",),
    "tp-comm-atomic-ag": ("true",), "tp-comm-atomic-rs": ("true",),
    "tp-comm-bulk-wgrad": ("true",), "tp-comm-bulk-dgrad": ("true",),
    "masked-softmax-fusion": ("true",), "bias-swiglu-fusion": ("true",),
    "bias-dropout-fusion": ("true",), "apply-rope-fusion": ("true",), "bias-gelu-fusion": ("true",),
    "gradient-accumulation-fusion": ("true",),
}  # fmt: skip
"""What Megatron does anyway, or with nothing that is here: given so, it is passed over."""

EXACT: Mapping[str, str] = {
    name: reason for reason, names in _REASONS for name in names.split() if not name.endswith("*")
}
"""Why, by name without its dashes."""
FAMILIES: Mapping[str, str] = {
    name[:-1]: reason for reason, names in _REASONS for name in names.split() if name.endswith("*")
}
"""Why, of all names that begin so."""

_VALUES: Mapping[tuple[str, str], str] = {
    ("offload", "nvme"): f"offload to NVMe {_LATER}; the nearest is --offload all",
}
"""Values that are asked for and are not there yet, by name without its dashes: why, and what is."""


def of_value(name: str, value: str) -> str | None:
    """What is said of a value that an accepted argument does not take; None: nothing in particular."""
    why = _VALUES.get((bare(name), value.lower()))
    return None if why is None else f"--{bare(name)} {value} is refused: {why}"


def reason(name: str) -> str | None:
    """Why `name` (with or without its dashes) is refused; None: Megatron has no such argument."""
    name = bare(name)
    if name in EXACT:
        return EXACT[name]
    found = [start for start in FAMILIES if name.startswith(start)]
    return FAMILIES[max(found, key=len)] if found else None


def asks_nothing(name: str, words: Iterable[str]) -> bool:
    """Whether what is refused is given in a way that changes nothing."""
    said = " ".join(words).lower()
    return said in ("false", "none") or said in _ASKS_NOTHING.get(bare(name), ())


def sentence(name: str, accepted: Iterable[str]) -> str:
    """What is said of an argument that is not accepted, a flag as it was given or a name; `accepted`: all that are,
    with their dashes."""
    flag, why = f"--{bare(name)}", reason(name)
    if why is not None:
        return f"{flag} is Megatron's, and refused here: {why}"
    known = sorted({*map(bare, accepted), *EXACT})
    near = get_close_matches(bare(name), known, n=1, cutoff=ALIKE)
    return f"there is no argument {name if name.startswith('--') else flag}" + (
        f": did you mean --{near[0]}?" if near else "; see --help"
    )


def bare(name: str) -> str:
    """`seq-length` of `--seq-length`, `seq_length` or `--seq_length`."""
    return name.removeprefix("--").replace("_", "-")

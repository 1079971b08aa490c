"""How a model is shared out over ranks, under Megatron's names. Pure."""

from dataclasses import dataclass
from typing import Literal

import torch

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.optimizer import Precision
from elastic.trainer.arguments.options import flag_of, spelled
from elastic.trainer.model.attention import Kernel
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.parallel.pipeline import Schedule, cut

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

_ZERO: dict[str, int] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_KERNEL: dict[str, Kernel | None] = {
    "auto": None, "flash": "flash", "fused": "cudnn", "flex": "flex", "unfused": "math", "local": "math",
}  # fmt: skip
_COMPUTE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutFlags:
    """Tensor, sequence, pipeline and data parallelism; memory."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = 1
    """Ranks that have some of the layers each."""
    data_parallel_size: int | None = None
    """Follows from the world: what is given has to agree, and a resize is refused."""
    sequence_parallel: bool = False
    """Ranks that share layers share the residual stream, too, by positions."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a stage, where a rank has several."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """The same said otherwise: stages of a rank."""
    pipeline_schedule: Schedule | None = None
    """In what order stages run micro-batches; if not given 1f1b, with several stages a rank interleaved."""
    use_distributed_optimizer: bool = False
    """ZeRO 1."""
    data_parallel_sharding_strategy: Sharding | None = None
    """ZeRO's stage by what is sharded."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """ZeRO's stage by its number; if none of the three is given 0."""
    reduction: Literal["exact", "fast"] = "exact"
    """exact: the same bits in any number of replicas. fast: gradients in fp32."""
    recompute_granularity: Literal["full", "selective"] | None = spelled(
        None, meaning={"--recompute-activations": "selective", "--checkpoint-activations": "full"}
    )
    """What backward computes again in place of keeping it: whole layers, or attention."""
    recompute_method: Literal["uniform", "block"] | None = spelled(
        None, "--activations-checkpoint-method"
    )
    """Which layers are computed again as a whole: all (as if not given), or the first of a stage."""
    recompute_num_layers: int | None = spelled(None, "--activations-checkpoint-num-layers")
    """uniform: layers that are computed again together; block: layers of a stage that are."""
    attention_backend: Literal["auto", "flash", "fused", "flex", "unfused", "local"] = spelled(
        "auto", meaning={"--use-flash-attn": "flash"}
    )
    """What computes attention: auto the best fused kernel that can, fused cuDNN's, flex torch's
    FlexAttention, local as unfused."""
    compile: bool = False
    """Compile each layer."""
    offload: Literal["none", "optimizer", "all"] = spelled(
        "none", meaning={"--optimizer-cpu-offload": "optimizer"}
    )
    """What is in host memory: nothing, the optimizer's moments, or all that is not being computed with."""

    def __post_init__(self) -> None:
        for name in (
            "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size",
            "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
            "recompute_num_layers",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{flag_of(name)} is at least 1, not {value}")
        if self.num_layers_per_virtual_pipeline_stage and self.num_virtual_stages_per_pipeline_rank:
            raise UsageError(
                "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
                "say the same: give one of them"
            )
        if self.pipeline_model_parallel_size == 1:
            for name in (
                "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
                "pipeline_schedule",
            ):  # fmt: skip
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"{flag_of(name)} wants --pipeline-model-parallel-size above 1"
                    )
        self._check_recompute()
        _ = self.zero

    @property
    def recompute(self) -> Recompute:
        """What backward computes again; a method alone means whole layers, as it did in 2022."""
        if self.recompute_granularity == "selective":
            return Recompute(granularity="selective")
        if self.recompute_granularity is None and self.recompute_method is None:
            return Recompute()
        return Recompute(
            granularity="full",
            method=self.recompute_method or "uniform",
            num_layers=self.recompute_num_layers or 1,
        )

    @property
    def zero(self) -> int:
        """ZeRO's stage."""
        said = {}
        strategy = self.data_parallel_sharding_strategy
        # In Megatron, strategies build on the distributed optimizer, and no_shard leaves it alone.
        if strategy is not None and not (strategy == "no_shard" and self.use_distributed_optimizer):
            said[f"--data-parallel-sharding-strategy {strategy}"] = _ZERO[strategy]
        if self.zero_stage is not None:
            said[f"--zero-stage {self.zero_stage}"] = self.zero_stage
        if self.use_distributed_optimizer and not any(said.values()):
            said["--use-distributed-optimizer"] = 1
        if len(set(said.values())) > 1:
            raise UsageError(f"{' and '.join(said)} are different stages of ZeRO: give one of them")
        return next(iter(said.values()), 0)

    @property
    def fused(self) -> bool:
        """Whether a kernel is asked for by name that computes attention as one."""
        return _KERNEL[self.attention_backend] not in (None, "math")

    def virtual(self, num_layers: int) -> int:
        """Stages of a rank."""
        layers = self.num_layers_per_virtual_pipeline_stage
        if layers is None:
            return self.num_virtual_stages_per_pipeline_rank or 1
        a_rank, rest = divmod(num_layers, self.pipeline_model_parallel_size)
        if rest or a_rank % layers:
            raise UsageError(
                f"--num-layers-per-virtual-pipeline-stage {layers} does not divide the layers of a "
                f"rank, {num_layers} / {self.pipeline_model_parallel_size}: give "
                "--num-virtual-stages-per-pipeline-rank, which takes any"
            )
        return a_rank // layers

    def layout(self, *, num_layers: int, precision: Precision) -> Layout:
        """The layout of a model with so many layers."""
        virtual = self.virtual(num_layers)
        cut(num_layers, self.pipeline_model_parallel_size * virtual)  # which checks it
        return Layout(
            tp=self.tensor_model_parallel_size,
            # Megatron turns it off where layers are not shared.
            sequence=self.sequence_parallel and self.tensor_model_parallel_size > 1,
            pp=self.pipeline_model_parallel_size,
            virtual=virtual,
            schedule=self.pipeline_schedule or ("interleaved" if virtual > 1 else "1f1b"),
            zero=self.zero,
            compute=_COMPUTE[precision],
            exact=self.reduction == "exact",
            recompute=self.recompute,
            compile=self.compile,
            attention=_KERNEL[self.attention_backend],
            offload=self.offload,
        )

    def check_world(self, size: int) -> None:
        """Raises `UsageError` where `size` ranks are no world for it."""
        replica = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        wanted = replica * (self.data_parallel_size or 1)
        if size % replica or (self.data_parallel_size and size != wanted):
            given = f"--tensor-model-parallel-size {self.tensor_model_parallel_size}"
            given += f" x --pipeline-model-parallel-size {self.pipeline_model_parallel_size}"
            if self.data_parallel_size:
                given += f" x --data-parallel-size {self.data_parallel_size}"
                raise UsageError(f"{given} are {wanted} ranks, and the world has {size}")
            ranks = "1 rank was" if size == 1 else f"{size} ranks were"
            raise UsageError(
                f"{given}: {ranks} started, which is no multiple of {replica}: start {replica} or a multiple, "
                f"such as by elastic-run --nproc-per-node={replica}"
            )

    def _check_recompute(self) -> None:
        if self.recompute_num_layers is not None and self.recompute_method is None:
            raise UsageError("--recompute-num-layers wants --recompute-method uniform or block")
        if self.recompute_method is not None and self.recompute_granularity == "selective":
            raise UsageError("--recompute-method wants --recompute-granularity full")

"""Megatron's arguments that are accepted and have no effect here. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """One of them."""

    why: str
    """Why it has none."""
    words: bool = False
    """Whether a word comes after it; else it is a switch."""
    only: tuple[str, ...] = ()
    """Words of which this is true; any, if empty."""
    spelled: tuple[str, ...] = ()
    """Its flags, where they are not its name alone."""

    def flags(self, name: str) -> tuple[str, ...]:
        """What it is on the command line."""
        return self.spelled or ("--" + name.replace("_", "-"),)

    def note(self, name: str) -> str:
        """The line that is said at start."""
        return f"{self.flags(name)[0]} has no effect here: {self.why}"


_CHECKPOINTS = "checkpoints are elastic.checkpoint's, written in the background, and fit any layout"
_INDEXED = "samples come from .bin and .idx, which are always mapped into memory"
_RANDOM = "no rank has random state: what is drawn is a function of seed, step and name"

UNUSED: Mapping[str, Unused] = {
    "dataset_impl": Unused(words=True, why=_INDEXED, spelled=("--dataset-impl", "--data-impl")),
    "chunk_size": Unused(words=True, why="it was one of preprocessing"),
    "distributed_backend": Unused(
        words=True, only=("nccl", "gloo"), why="a device has its own: NCCL for GPUs, Gloo for CPUs"
    ),
    "optimizer": Unused(words=True, only=("adam",), why="AdamW is the one that there is"),
    "local_rank": Unused(
        words=True, why="a rank's number comes with its environment",
        spelled=("--local-rank", "--local_rank"),
    ),
    "DDP_impl": Unused(
        words=True, only=("local", "torch"),
        why="both add the same gradients up, and here FSDP2 does, at every stage of ZeRO",
    ),
    "use_mcore_models": Unused(why="there is one model"),
    "transformer_impl": Unused(
        words=True, only=("local", "transformer_engine"), why="there is one model"
    ),
    "async_tensor_model_parallel_allreduce": Unused(
        why="Megatron ignores it, too",
        spelled=(
            "--async-tensor-model-parallel-allreduce", "--no-async-tensor-model-parallel-allreduce",
        ),
    ),
    "no_load_rng": Unused(why=_RANDOM),
    "no_save_rng": Unused(why=_RANDOM),
    "ckpt_format": Unused(words=True, why=_CHECKPOINTS),
    "use_dist_ckpt": Unused(why=_CHECKPOINTS),
    "async_save": Unused(why=_CHECKPOINTS),
    "override_opt_param_scheduler": Unused(
        why="schedules always follow the arguments",
        spelled=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    ),
    "accumulate_allreduce_grads_in_fp32": Unused(why="gradients are added up in fp32 or wider"),
    "overlap_grad_reduce": Unused(why="FSDP2 overlaps by itself"),
    "overlap_param_gather": Unused(why="FSDP2 overlaps by itself"),
    "apply_layernorm_1p": Unused(why="a norm's weight does not decay, so what it counts from is one"),
}  # fmt: skip
"""By Megatron's names for them. In tests one is set and everything else is the same."""

"""What is watched of a run, beside Megatron's own flags for the console and TensorBoard."""

from dataclasses import dataclass
from pathlib import Path

from elastic.proto.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchFlags:
    """Metrics, phases, memory, probes and replicas. Nothing is watched by default that costs anything."""

    metrics_file: Path | None = None
    """JSON lines of steps, evaluations, probes and verdicts; None: `metrics.jsonl` in the job's folder,
    and none outside `elastic-run`."""
    log_mfu: bool = False
    """Whether the log line ends with tokens a second and MFU."""
    trace_phases: Path | None = None
    """Folder of a Chrome trace for each rank: what each step's time went to."""
    device_peak_tflops: float | None = None
    """What MFU is a part of, dense bf16 TFLOP/s of a device; None: as known of it by its name."""
    record_memory_history: bool = False
    """Whether CUDA's allocations are recorded, and written at the end or when memory runs out."""
    memory_snapshot_path: Path = Path("snapshot.pickle")
    """Where to, for https://pytorch.org/memory_viz; ranks above 0 put their number before the suffix."""
    profile: bool = False
    """Whether some steps are profiled: marked for `nsys profile --capture-range=cudaProfilerApi`."""
    use_pytorch_profiler: bool = False
    """Whether --profile is PyTorch's instead, whose traces go to --tensorboard-dir."""
    profile_step_start: int = 10
    """Finished steps behind which it begins."""
    profile_step_end: int = 12
    """The last step that is profiled."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that are."""
    probe_file: Path | None = None
    """JSON lines of texts whose probability and perplexity are told as training goes on."""
    probe_interval: int = 1000
    """Steps between two looks at them."""
    check_weight_hash_across_dp_replicas_interval: int | None = None
    """Steps between two comparisons of the bits that replicas hold; None: they are not compared."""

    def __post_init__(self) -> None:
        if self.device_peak_tflops is not None and not self.device_peak_tflops > 0:
            raise UsageError("--device-peak-tflops is above 0")
        if not 0 <= self.profile_step_start < self.profile_step_end:
            raise UsageError("--profile-step-start is at least 0, and below --profile-step-end")
        if self.probe_interval < 1:
            raise UsageError("--probe-interval is at least 1")
        interval = self.check_weight_hash_across_dp_replicas_interval
        if interval is not None and interval < 1:
            raise UsageError("--check-weight-hash-across-dp-replicas-interval is at least 1")

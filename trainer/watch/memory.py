"""Device memory: what is in use, its history for torch's viewer, and what is said when it runs out."""

import contextlib
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.proto.errors import ElasticError, UsageError
from elastic.trainer.parallel.footprint import Footprint

ENTRIES = 200_000
"""Allocations and frees that a history goes back."""

log = logging.getLogger(__name__)
_HOST = re.compile(r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)")
_DEVICE = re.compile(r"\b(?:CUDA|HIP)(?: error:| failure \d+)? '?out of memory", re.IGNORECASE)
_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)|tried to allocate (\d+) bytes")


class OutOfMemoryError(ElasticError):
    """Memory has run out; the message is one line for a person.

    Its name, and that the line has "CUDA out of memory", tell the master what it was.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the allocator of a device has; bytes, peaks since the process began."""

    allocated: int
    """In tensors."""
    reserved: int
    """Taken from the device."""
    peak_allocated: int
    peak_reserved: int
    allocations: int
    """Tensors' pieces."""
    retries: int
    """Times that it freed its cache to go on: near the limit, and slow."""
    ooms: int
    """Times that there was not enough, those that were caught included."""


def of_device(device: torch.device) -> Memory | None:
    """None where it is no GPU."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return Memory(
        allocated=stats.get("allocated_bytes.all.current", 0),
        reserved=stats.get("reserved_bytes.all.current", 0),
        peak_allocated=stats.get("allocated_bytes.all.peak", 0),
        peak_reserved=stats.get("reserved_bytes.all.peak", 0),
        allocations=stats.get("allocation.all.current", 0),
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def scalars(memory: Memory) -> dict[str, float]:
    """TensorBoard's tags; those that Megatron has, and three more."""
    return {
        "mem-reserved-bytes": memory.reserved,
        "mem-allocated-bytes": memory.allocated,
        "mem-max-allocated-bytes": memory.peak_allocated,
        "mem-allocated-count": memory.allocations,
        "mem-max-reserved-bytes": memory.peak_reserved,
        "mem-alloc-retries": memory.retries,
        "mem-ooms": memory.ooms,
    }


def theoretical(footprint: Footprint, device: int | None) -> str:
    """Megatron's line of what a step takes on a device at its peak; device: bytes that it has."""
    activations = footprint.activations + footprint.working
    parts = {
        "weight and optimizer": footprint.total - activations, "activation": activations,
        "total": footprint.total,
    }  # fmt: skip
    sizes = ", ".join(f"{name}={size / 2**20:.2f} MB" for name, size in parts.items())
    text = f"Theoretical memory footprints: {sizes}"
    if device is not None and footprint.total > device:
        text += f"; more than the device's {device / 2**20:.2f} MB"
    return text


@contextlib.contextmanager
def recorded(path: Path, rank: int) -> Iterator[None]:
    """Record allocations as long as a block lasts; written when memory runs out in it, and at its end.

    path: of rank 0; others have their number before its suffix. The file is what torch writes for
    https://pytorch.org/memory_viz. Without a GPU it says that it has no effect. Raises UsageError where there can
    be no such file.
    """
    if not torch.cuda.is_available():
        log.warning("--record-memory-history has no effect without a GPU")
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--memory-snapshot-path {path} cannot be written: {error.strerror}; name another"
        ) from error
    path = of_rank(path, rank)
    ran_out = False

    def write(*_: Any) -> None:
        nonlocal ran_out
        ran_out = True
        _write(path)

    torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
    # Called before anything is freed on the way out.
    torch._C._cuda_attach_out_of_memory_observer(write)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if not ran_out:  # what it was like then is of more use than the end
            _write(path)
        torch.cuda.memory._record_memory_history(enabled=None)


def of_rank(path: Path, rank: int) -> Path:
    """`snapshot.pickle` of rank 0, `snapshot.3.pickle` of rank 3."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}") if rank else path


def _write(path: Path) -> None:
    try:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        log.warning("the history of device memory is in %s", path)
    except (OSError, RuntimeError) as error:
        log.warning("the history of device memory could not be written to %s: %s", path, error)


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that memory, a device's or the host's, has run out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(
        _HOST.search(str(error)) or _DEVICE.search(str(error))
    )


def explained(
    error: BaseException,
    *,
    where: str,
    memory: Memory | None,
    advice: Sequence[str],
    saved: bool,
) -> OutOfMemoryError:
    """The one line about it.

    where: such as `rank 3`. saved: whether there are checkpoints.
    """
    kind = "CPU" if isinstance(error, MemoryError) or _HOST.search(str(error)) else "CUDA"
    text = f"{kind} out of memory ({where})"
    if asked := _ASKED.search(str(error)):
        size = asked[1] or _gib(int(asked[2]))
        text += f": {size} were asked for"
    if memory is not None and kind == "CUDA":
        text += (
            f", {_gib(memory.allocated)} were in use, {_gib(memory.peak_allocated)} at the most, "
            f"of {_gib(memory.reserved)} that were taken from the device"
        )
    if advice:
        text += f"; {', or '.join(advice)}"
    return OutOfMemoryError(text + ("; the last checkpoint is kept" if saved else ""))


def advice(
    *,
    micro_batch_size: int,
    recompute: str | None,
    zero: int,
    data_parallel: int,
    tensor_parallel: int,
    attention_dropout: float,
) -> list[str]:
    """What to turn, what costs least first; the global batch stays as it is with all of it."""
    found = []
    if attention_dropout > 0 and recompute is None:
        found.append("give --attention-dropout 0, with which attention is fused")
    if micro_batch_size > 1:
        found.append(f"lower --micro-batch-size below {micro_batch_size}")
    if recompute is None:
        found.append("give --recompute-activations")
    if recompute != "full":
        found.append("give --recompute-granularity full --recompute-method uniform")
    if zero < 3 and data_parallel > 1:
        found.append(f"raise --zero-stage above {zero}")
    more = "raise" if data_parallel > 1 else "start more ranks and raise"
    found.append(f"{more} --tensor-model-parallel-size above {tensor_parallel}")
    return found


def end(error: OutOfMemoryError) -> int:
    """Say it, to the agent too, which takes it for what it is; the status to exit with."""
    with contextlib.redirect_stderr(
        io.StringIO()
    ):  # hooks say it with its kind, and torch's with the rank
        sys.excepthook(type(error), error.with_traceback(None), None)
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    return 1


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"

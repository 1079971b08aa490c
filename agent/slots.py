"""How many ranks this node runs: `--nproc-per-node`, resolved by a look at the machine.

No torch is imported: GPUs are counted through NVML, which is what torch does, in milliseconds. What
only torch knows (an XPU, an AMD GPU, a device of an extension) a short-lived Python is asked.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from elastic.agent.visible_devices import visible_devices
from elastic.proto.errors import UsageError

_ASK_TORCH = """\
import sys, torch
device = getattr(torch, sys.argv[1], None)
available = getattr(device, "is_available", None)
print(device.device_count() if available is not None and available() else 0)
"""
_ASK_TIMEOUT = 120.0  # importing torch from a cold network file system takes a while


def resolve_slots(nproc: str, environ: Mapping[str, str]) -> int:
    """Ranks for `--nproc-per-node`: a number, or the count of what it names (gpu, cpu, auto, ...).

    Raises UsageError, in one sentence, where there is no such device.
    """
    if nproc.isdecimal() and int(nproc) > 0:
        return int(nproc)
    if nproc == "cpu":
        return cpu_count()
    if nproc not in ("gpu", "auto"):
        return _ask_torch(nproc, environ) or _none(nproc, f"PyTorch finds no {nproc} device here")
    gpus = gpu_count(environ)
    if nproc == "auto":
        return gpus or cpu_count()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" with CUDA_VISIBLE_DEVICES={visible!r}"
    return gpus or _none(nproc, f"no GPU can be used here{hidden}")


def gpu_count(environ: Mapping[str, str]) -> int:
    """GPUs that ranks may use, by CUDA_VISIBLE_DEVICES in `environ`; 0 where there are none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.startswith("MIG-"):
        return _ask_torch("cuda", environ)  # NVML counts whole GPUs
    uuids = _nvml_uuids()
    if not uuids and Path("/dev/kfd").exists():  # AMD's driver; its torch calls them cuda as well
        return _ask_torch("cuda", environ)
    return len(visible_devices(visible, uuids))


def cpu_count(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use, by affinity and by the quotas of its cgroups; at least 1."""
    counts = [len(os.sched_getaffinity(0))]
    counts += [int(quota) for quota in _cgroup_quotas(proc, mount)]
    return max(1, min(counts))


def _none(nproc: str, reason: str) -> int:
    raise UsageError(f"--nproc-per-node {nproc}: {reason}; give a number, or cpu")


def _nvml_uuids() -> list[str]:
    """UUIDs of the GPUs, in NVML's order, which CUDA_VISIBLE_DEVICES counts in; [] without NVML."""
    import pynvml  # here, as only nodes with GPUs have any use for it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError as error:
        raise UsageError(f"the GPUs cannot be counted: {error}; give --nproc-per-node") from error
    finally:
        pynvml.nvmlShutdown()


def _cgroup_quotas(proc: Path, mount: Path) -> list[float]:
    """CPUs that each cgroup above this process allows, v2 and v1, where one sets a limit."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        # In a container the path is the host's and may not exist below the mount; its parents do.
        folders = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        found = (_quota(root / folder) for root in roots for folder in folders)
        quotas += (quota for quota in found if quota is not None)
    return quotas


def _quota(cgroup: Path) -> float | None:
    """CPUs that one cgroup allows, or None for no limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    limited = quota.isdecimal() and period.isdecimal() and int(period) > 0  # not "max", not -1
    return int(quota) / int(period) if limited else None


def _ask_torch(device: str, environ: Mapping[str, str]) -> int:
    """Devices of a kind, as a Python of their own with torch counts them; 0 where it has none."""
    python = environ.get("PYTHON_EXEC") or sys.executable
    try:
        answer = subprocess.run(
            [python, "-c", _ASK_TORCH, device],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT,
            check=True,
        )
        return int(answer.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise UsageError(
            f"PyTorch could not count {device} devices ({''.join(last)}); give --nproc-per-node"
        ) from error

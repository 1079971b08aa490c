"""`--numa-binding`: which CPUs a rank runs on, from where its GPU sits. torchrun's four modes.

Reads sysfs; the GPU of a rank is the one whose index is its local rank, as torchrun assumes. Set as
the process's affinity before it starts, so no numactl is needed.
"""

from collections.abc import Sequence
from pathlib import Path

from elastic.proto.errors import UsageError

_SYS = Path("/sys")


def gpu_nodes(sys: Path = _SYS) -> list[int]:
    """The NUMA node of each GPU, by NVML's index. Raises UsageError where there is no GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        buses = [pynvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles]
    except Exception as error:
        raise UsageError(f"--numa-binding needs NVIDIA GPUs, and NVML says: {error}") from error
    return [_pci_node(bus if isinstance(bus, str) else bus.decode(), sys) for bus in buses]


def _pci_node(bus: str, sys: Path) -> int:
    domain, rest = bus.lower().split(":", 1)
    path = sys / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    try:
        return max(0, int(path.read_text()))
    except (OSError, ValueError):
        return 0  # one node, or a virtual machine that does not tell


def cpus(
    mode: str, local_rank: int, gpus: Sequence[int], allowed: frozenset[int], sys: Path = _SYS
) -> tuple[int, ...]:
    """CPUs of a rank. `gpus` are the GPUs' NUMA nodes, `allowed` what the launcher may use.

    Raises UsageError where there is no such GPU, or nothing is left to run on.
    """
    if local_rank >= len(gpus):
        raise UsageError(
            f"--numa-binding: there is no GPU {local_rank} for local rank {local_rank}"
        )
    node = gpus[local_rank]
    mine = [index for index, other in enumerate(gpus) if other == node]
    place, sharers = mine.index(local_rank), len(mine)
    here = _node_cpus(node, sys) & allowed
    if mode == "socket":
        socket = _socket(min(here, default=0), sys)
        here = frozenset(cpu for cpu in allowed if _socket(cpu, sys) == socket)
    elif mode == "exclusive":
        here = _share(_groups(here, "topology/thread_siblings_list", sys), place, sharers)
    elif mode == "core-complex":
        complexes = _groups(here, "cache/index3/shared_cpu_list", sys)
        here = complexes[place % len(complexes)] if complexes else here
    if not here:
        raise UsageError(f"--numa-binding {mode}: no CPU that may be used is near GPU {local_rank}")
    return tuple(sorted(here))


def _share(cores: list[frozenset[int]], place: int, sharers: int) -> frozenset[int]:
    """Whole cores, evenly; the first sharers take what is over."""
    if len(cores) < sharers:
        return frozenset()
    size, over = divmod(len(cores), sharers)
    begin = place * size + min(place, over)
    chosen = cores[begin : begin + size + (place < over)]
    return frozenset().union(*chosen)


def _groups(cpus_: frozenset[int], name: str, sys: Path) -> list[frozenset[int]]:
    """CPUs that share what the sysfs file `name` lists, ordered by their lowest."""
    found: dict[frozenset[int], None] = {}
    for cpu in sorted(cpus_):
        path = sys / f"devices/system/cpu/cpu{cpu}" / name
        shared = _ranges(path) & cpus_ if path.is_file() else frozenset()
        found[shared or frozenset({cpu})] = None
    return list(found)


def _node_cpus(node: int, sys: Path) -> frozenset[int]:
    path = sys / f"devices/system/node/node{node}/cpulist"
    return _ranges(path if path.is_file() else sys / "devices/system/cpu/online")


def _socket(cpu: int, sys: Path) -> int:
    path = sys / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id"
    return int(path.read_text()) if path.is_file() else 0


def _ranges(path: Path) -> frozenset[int]:
    return ranges(path.read_text())


def ranges(text: str) -> frozenset[int]:
    """`0-3,8` as a set."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)

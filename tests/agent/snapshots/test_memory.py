"""The memory that snapshots may take: never more than there is, and never fewer without a word."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent import cgroup
from elastic.agent.snapshots import memory
from elastic.agent.snapshots.memory import COPIES, FEWEST, REPLICATED, RESERVE, SLOTS, reckon

GIB = 1 << 30


@given(
    slot_bytes=st.integers(1, 1 << 44),
    ranks=st.integers(1, 128),
    available=st.integers(-(1 << 44), 1 << 52),
    replicas=st.booleans(),
)
def test_what_is_reckoned_is_to_be_had(
    slot_bytes: int, ranks: int, available: int, replicas: bool
) -> None:
    found = reckon(slot_bytes=slot_bytes, ranks=ranks, available=available, replicas=replicas)
    assert found.slots == 0 or FEWEST <= found.slots <= REPLICATED
    sets = found.slots + (COPIES if found.replicas else 0)
    assert sets * slot_bytes * ranks <= max(0, available)
    assert (found.replicas, found.slots) == (replicas, REPLICATED if replicas else SLOTS) or (
        found.reason and not found.replicas
    )
    assert ("storage" in found.reason) == (found.slots == 0)
    if found.reason and found.slots:
        assert (found.slots + 1) * slot_bytes * ranks > available or found.slots == SLOTS


@given(st.integers(1, 1 << 44), st.integers(1, 128), st.booleans(), st.integers(0, 1 << 52))
def test_more_memory_is_never_fewer_slots(
    slot_bytes: int, ranks: int, replicas: bool, available: int
) -> None:
    less, more = (
        reckon(slot_bytes=slot_bytes, ranks=ranks, available=room, replicas=replicas)
        for room in (available, available + slot_bytes)
    )
    assert (less.slots, less.replicas) <= (more.slots, more.replicas)


@pytest.mark.parametrize(
    ("room", "replicas", "found", "said"),
    [
        (64, False, (4, False), ""),
        (63, False, (3, False), "each has 3"),
        (
            31,
            False,
            (0, False),
            "none are taken, and what is to be persisted is written to storage at once",
        ),
        (128, True, (6, True), ""),
        (127, True, (4, False), "each has 4, and there are no replicas"),
    ],
)
def test_a_retreat_says_what_was_wanted_and_what_there_is(
    room: int, replicas: bool, found: tuple[int, bool], said: str
) -> None:
    made = reckon(slot_bytes=2 * GIB, ranks=8, available=room * GIB, replicas=replicas)
    wanted = f"{8 if replicas else 4} slots of 2.0 GiB for each of 8 ranks were wanted"
    reason = f"{room}.0 GiB of memory can be had for snapshots, {wanted}: {said}"
    assert (made.slots, made.replicas) == found
    assert made.reason == (reason if said else "")


def meminfo(folder: Path, total: int, available: int) -> Path:
    path = folder / "meminfo"
    path.write_text(
        f"MemTotal:       {total >> 10} kB\nMemFree:           1 kB\n"
        f"MemAvailable:   {available >> 10} kB\nBuffers:           5 kB\n"
    )
    return path


@pytest.mark.parametrize(
    ("total", "free", "left"),
    [(4 * GIB, 0, -RESERVE), (1000 * GIB, 3 * GIB, -97 * GIB), (1000 * GIB, GIB, -99 * GIB)],
)
def test_a_reserve_is_left_to_everything_else(
    tmp_path: Path, total: int, free: int, left: int
) -> None:
    cgroups = [most - used - max(RESERVE, most // 10) for most, used in cgroup.limits()]
    found = memory.available(meminfo(tmp_path, total, free))
    assert found == left or min(cgroups, default=left) < left


@pytest.mark.parametrize(
    ("mems", "left"),
    [
        ("0", 5 * GIB - RESERVE),
        ("0,2", 7 * GIB - RESERVE),
        ("0-2", 100 * GIB - 40 * GIB),
        ("0-7", 100 * GIB - 40 * GIB),
    ],
)
def test_a_cpuset_leaves_what_its_numa_nodes_have(tmp_path: Path, mems: str, left: int) -> None:
    """Of 400 GiB, 100 to be had; each of three nodes has 5, of which a tenth is less than the reserve."""
    cgroups = [most - used - max(RESERVE, most // 10) for most, used in cgroup.limits()]
    status = tmp_path / "status"
    status.write_text(f"Cpus_allowed_list:\t0\nMems_allowed_list:\t{mems}\nvoluntary:\t1\n")
    for node, free in ((0, 3), (1, 4), (2, 0)):
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        lines = {"MemTotal": 5 * GIB, "MemFree": free * GIB, "Active": 8 * GIB}
        lines |= {"Active(anon)": 4 * GIB, "Active(file)": GIB, "SReclaimable": GIB}
        text = [f"Node {node} {name}: {size >> 10:>14} kB\n" for name, size in lines.items()]
        (folder / "meminfo").write_text("".join(text))
    found = memory.available(meminfo(tmp_path, 400 * GIB, 100 * GIB), status, tmp_path)
    assert found == left or min(cgroups, default=left) < left


@pytest.mark.parametrize(
    ("mount", "entry", "names"),
    [
        (
            "cgroup2 {} cgroup2 rw,relatime 0 0",
            "0::/pod/ours",
            ("memory.max", "memory.current", "", "total_"),
        ),
        (
            "cgroup {}/cpu cgroup rw,cpu 0 0\ncgroup {} cgroup rw,relatime,memory 0 0",
            "5:cpu:/other\n4:memory:/pod/ours\n0::/",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", ""),
        ),
    ],
)
def test_each_cgroup_above_us_has_a_limit(
    tmp_path: Path, mount: str, entry: str, names: tuple[str, str, str, str]
) -> None:
    """In a container our own may not be there to be seen. The kernel can drop all of a file's pages."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    proc.mkdir()
    (proc / "mounts").write_text(f"proc /proc proc rw 0 0\n{mount.format(root, root)}\n")
    (proc / "cgroup").write_text(entry + "\n")
    most, used, own, other = names
    stat = "cache 7\n" + "".join(
        f"{whose}{kind}active_file {size}\n"
        for whose, size in ((other, 5), (own, GIB))
        for kind in ("in", "")
    )
    for folder, limit in ((root / "pod", 8 * GIB), (root, 16 * GIB)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / most).write_text(f"{limit}\n")
        (folder / used).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(stat)
    assert cgroup.limits(proc) == [(8 * GIB, GIB), (16 * GIB, GIB)]
    (root / most).write_text("max\n")
    assert cgroup.limits(proc) == [(8 * GIB, GIB)]


def test_a_kernel_that_names_no_amount_has_none(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("")
    assert memory.available(path) <= -RESERVE


def test_this_machine_has_an_answer() -> None:
    limits = cgroup.limits()
    assert all(most > 0 and used >= 0 for most, used in limits)
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert memory.available() < total
    assert all(memory.available() < most for most, _ in limits)

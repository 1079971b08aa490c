"""--numa-binding over a made-up machine: two sockets, two nodes, four GPUs, two L3s a node."""

from pathlib import Path

import pytest

from elastic.agent.numa import cpus
from elastic.proto.errors import UsageError

GPUS = [0, 0, 1, 1]
ALL = frozenset(range(16))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """16 CPUs: cores are pairs (n, n + 8); node 0 has CPUs 0-3 and 8-11; an L3 serves two cores."""
    for cpu in range(16):
        core = cpu % 8
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "cache/index3").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{core},{core + 8}\n")
        (folder / "topology/physical_package_id").write_text(f"{core // 4}\n")
        low = core // 2 * 2
        (folder / "cache/index3/shared_cpu_list").write_text(
            f"{low}-{low + 1},{low + 8}-{low + 9}\n"
        )
    for node, text in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "local_rank", "expected"),
    [
        ("node", 0, [0, 1, 2, 3, 8, 9, 10, 11]),
        ("node", 3, [4, 5, 6, 7, 12, 13, 14, 15]),
        ("socket", 2, [4, 5, 6, 7, 12, 13, 14, 15]),
        ("exclusive", 0, [0, 1, 8, 9]),
        ("exclusive", 1, [2, 3, 10, 11]),
        ("core-complex", 2, [4, 5, 12, 13]),
        ("core-complex", 3, [6, 7, 14, 15]),
    ],
)
def test_each_mode(machine: Path, mode: str, local_rank: int, expected: list[int]) -> None:
    assert list(cpus(mode, local_rank, GPUS, ALL, machine)) == expected


def test_stays_within_what_the_launcher_may_use(machine: Path) -> None:
    assert cpus("node", 0, GPUS, frozenset({1, 5}), machine) == (1,)


def test_says_when_there_is_no_such_gpu(machine: Path) -> None:
    with pytest.raises(UsageError, match="no GPU 4"):
        cpus("node", 4, GPUS, ALL, machine)


def test_says_when_nothing_is_left_to_run_on(machine: Path) -> None:
    with pytest.raises(UsageError, match="no CPU"):
        cpus("exclusive", 0, GPUS, frozenset({5}), machine)

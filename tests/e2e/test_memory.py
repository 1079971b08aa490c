"""Jobs for whose snapshots there is little memory: real limits, of a cgroup."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent import kernel_log
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from tests.e2e.harness import FORK, Job

SCRIPT = Path(__file__).parent / "harness" / "scripts" / "saves.py"
GREEDY = """
import mmap, os
if os.environ["RANK"] == "1" and os.environ["ELASTIC_ROUND"] == "1":
    mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).write(bytes(4 << 30))
"""
"""Private memory, which is free once its owner is dead: shared memory goes some time later, and until then
the kernel looks for another to kill."""
GROWING = """
import os, socket, time
if os.environ["ELASTIC_ROUND"] == "1":
    to_store = socket.create_connection((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
    held = []
    while True:
        held.append(b"x" * 20_000_000)
        time.sleep(0.3)
"""
"""A rank without torch grows by less at a time than the store's process has: that one is the kernel's first choice."""
OWN = 150_000_000
"""Bytes of each of two ranks: four slots of each are 1.3 GB."""
GIB = 1 << 30
FILES = {
    "memory.limit_in_bytes": ("memory.oom_control", Path("/sys/fs/cgroup/memory")),
    "memory.max": ("memory.events", Path("/sys/fs/cgroup")),
}
"""Of both versions: what holds the limit, what counts who was killed, where the mount is."""


@pytest.fixture
def cgroup(job: Job) -> Iterator[Path]:
    """That takes a limit."""
    for _, mount in FILES.values():
        path = mount / f"elastic-test-{os.getpid()}-{job.folder.name}"
        # A mount that is no hierarchy takes folders, and limits nothing.
        if not (mount / "cgroup.procs").exists():
            continue
        with contextlib.suppress(OSError):
            path.mkdir()
            try:
                limit(path, 64 * GIB)
            except OSError:
                path.rmdir()
                raise
            break
    else:
        pytest.skip("no cgroup with a limit can be made")
    yield path
    job.wait_for("the end of all in it", lambda: not (path / "cgroup.procs").read_text())
    path.rmdir()


def limit(cgroup: Path, size: int) -> None:
    """Bytes for all in it. Raises OSError."""
    name = next(name for name in FILES if name == "memory.max" or (cgroup / name).exists())
    (cgroup / name).write_text(str(size))


def inside(cgroup: Path) -> tuple[str, ...]:
    """What has a launcher start in it."""
    return ("sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh")


def killed(cgroup: Path) -> int:
    """How many processes the kernel has killed for memory."""
    text = "".join((cgroup / f).read_text() for f, _ in FILES.values() if (cgroup / f).exists())
    found = re.search(r"^oom_kill (\d+)", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1])


@pytest.mark.soak
def test_a_node_that_leaves_snapshots_out_holds_up_no_other(job: Job, cgroup: Path) -> None:
    """The other's are never whole, and no save of its waits for them to be."""
    limit(cgroup, 2 * GIB)  # half of it is the reserve, and the rank alone has more than 0.5 GB
    entry = (str(SCRIPT), str(job.folder), "--own", str(2 * OWN), "--persist-every", "10")
    other = job.start(FORK, entry=entry, nodes="2", nproc=1)
    other.master()
    node = job.start(FORK, prefix=inside(cgroup), entry=entry, nodes="2", nproc=1)
    job.wait_for_steps(2, count=13)
    job.finish()
    for one in (node, other):
        assert one.exit_code() == 0, job.dump()
        assert "no snapshots until" not in one.said(), job.dump()
    assert "none are taken" in node.said(), job.dump()
    assert "none are taken" not in other.said(), job.dump()
    stored = manifests.committed(Folder(job.folder / "checkpoint"))
    assert stored is not None
    assert stored.step in (10, 20)


def test_no_more_slots_than_a_cgroup_has_room_for(job: Job, cgroup: Path) -> None:
    """Though this machine has."""
    limit(cgroup, 3 * GIB)  # a third is the reserve, and processes and states take nearly half
    entry = (str(SCRIPT), str(job.folder), "--own", str(OWN), "--persist-every", "4")
    node = job.start(prefix=inside(cgroup), entry=entry)
    job.wait_for_steps(2, count=9)
    job.finish()
    assert node.exit_code() == 0, job.dump()
    said = re.findall(r"(\d\.\d) GiB of memory can be had for snapshots.*: (.*)", node.said())
    assert len(said) == 1, job.dump()
    assert said[0][1] in ("each has 2", "each has 3"), said
    assert killed(cgroup) == 0
    stored = manifests.committed(Folder(job.folder / "checkpoint"))
    assert stored is not None
    assert stored.step >= 8


def test_a_store_that_the_kernel_killed_for_its_node_is_no_fault_of_the_stores(
    job: Job, cgroup: Path
) -> None:
    """Whoever is the largest of a cgroup is killed, whoever has grown."""
    limit(cgroup, 300 << 20)
    (job.folder / "growing.py").write_text(GROWING)
    node = job.start(prefix=inside(cgroup), entry=(str(job.folder / "growing.py"),), nproc=1)
    assert node.exit_code() == 0, job.dump()
    assert killed(cgroup) > 0
    told = json.loads(job.ctl("-o", "json", "why"))
    assert (told["label"], told["cause"]) == ("cgroup_oom", "kernel out of memory"), told


def test_what_the_kernel_says_of_who_it_killed_is_the_evidence(job: Job, cgroup: Path) -> None:
    """Where we may read its log; else its count alone tells."""
    limit(cgroup, GIB)
    (job.folder / "greedy.py").write_text(GREEDY)
    node = job.start(prefix=inside(cgroup), entry=(str(job.folder / "greedy.py"),))
    assert node.exit_code() == 0, job.dump()
    assert killed(cgroup) > 0
    told = json.loads(job.ctl("-o", "json", "why"))
    assert (told["label"], told["rank"], told["cause"]) == ("cgroup_oom", 1, "kernel out of memory")
    try:
        os.close(kernel_log.open_log())
    except OSError:
        return
    assert re.match("oom-kill:|Memory cgroup out of memory", told["evidence"][0]), told

"""A job for each test, ended whatever becomes of it."""

import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job, Node
from tests.e2e.harness.network import Network, missing
from tests.e2e.harness.network import start as start_on
from tests.e2e.harness.stuck import StuckFolder
from tests.e2e.harness.stuck import stuck_folder as make_stuck_folder


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.fixture
def network() -> Iterator[Network]:
    """Four hosts."""
    if why := missing():
        pytest.skip(f"no network namespaces: {why}")
    with Network(f"e2e{secrets.token_hex(3)}", 4) as made:
        yield made


@pytest.fixture(
    params=["loopback", pytest.param("hosts", marks=[pytest.mark.netns, pytest.mark.soak])]
)
def start(job: Job, request: pytest.FixtureRequest) -> Callable[..., Node]:
    """Starts the job's next launcher: beside the others, or on the next host of a network, where
    the ranks train together."""
    if request.param == "loopback":
        return job.start
    network: Network = request.getfixturevalue("network")

    def on_the_next_host(*flags: str, nodes: str, nproc: int) -> Node:
        number = len(job.nodes)
        return start_on(job, network, number, *flags, nodes=nodes, nproc=nproc, script="--torch")

    return on_the_next_host


@pytest.fixture
def stuck_folder(job: Job) -> Iterator[StuckFolder]:
    with make_stuck_folder(job.folder / "stuck") as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB and 200 files, which fills up soon."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = "size=1m,nr_inodes=200"
    mount = ("mount", "-t", "tmpfs", "-o", options, "elastic-e2e", str(disk))
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(("umount", "-l", str(disk)), check=True)

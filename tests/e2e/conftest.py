"""A job for each test, ended whatever becomes of it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


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

"""The disk of a folder: full, read-only, missing."""

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.agent.probes.healthy import environ, module
from tests.e2e.harness.disk import fill


def ask(folder: Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    command = module("disk", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """One of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=8m", "elastic-probes", str(folder))
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


def test_a_good_disk(disk: Path) -> None:
    said = ask(disk)
    assert said["ok"], said
    assert 0 < said["figures"]["free_bytes"] <= 8 << 20
    assert not list(disk.iterdir())


def test_a_disk_that_gives_something_else_back(tmp_path: Path) -> None:
    fault = """
import os
pread = os.pread
def corrupting(fd, count, at):
    data = pread(fd, count, at)
    return data if at == 0 or len(data) < 2 else data[:-1] + bytes([data[-1] ^ 8])
os.pread = corrupting
"""
    said = ask(tmp_path, environ(tmp_path / "site", fault))
    assert not said["ok"]
    assert re.search(r"what was read at byte [1-9]\d* is not what was written", said["what"])


def test_a_full_disk(disk: Path) -> None:
    fill(disk)
    said = ask(disk)
    assert not said["ok"], said
    assert "No space left on device (ENOSPC)" in said["what"]


def test_a_disk_that_is_too_small(disk: Path) -> None:
    (disk / "most").write_bytes(b"x" * (6 << 20))
    assert "ENOSPC" in ask(disk)["what"]
    assert [file.name for file in disk.iterdir()] == ["most"]


def test_a_read_only_disk(disk: Path) -> None:
    subprocess.run(("mount", "-o", "remount,ro", str(disk)), check=True)
    assert "Read-only file system (EROFS)" in ask(disk)["what"]


def test_a_missing_folder(tmp_path: Path) -> None:
    said = ask(tmp_path / "nowhere")
    assert not said["ok"]
    assert said["what"] == "there is no such folder"

"""Memory, of files as kernels write them."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.agent.probes.healthy import module

GIB = 1 << 30
PRESSURE = """\
some avg10={some} avg60=0.10 avg300=0.02 total=123456
full avg10={full} avg60=0.05 avg300=0.01 total=65432
"""


class Proc:
    """A /proc, and the cgroups that it names."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.groups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "pressure").mkdir()
        (self.proc / "meminfo").write_text(
            "MemTotal:       528280000 kB\nMemFree:  1000 kB\nMemAvailable:   400000000 kB\n"
        )
        (self.proc / "pressure/memory").write_text(PRESSURE.format(some="1.50", full="0.25"))

    def version_2(self, *, most: str, used: int, cache: int, full: str = "0.00") -> None:
        ours = self.groups / "kubepods/pod7"
        ours.mkdir(parents=True)
        (self.proc / "self/mounts").write_text(f"cgroup2 {self.groups} cgroup2 rw,nosuid 0 0\n")
        (self.proc / "self/cgroup").write_text("0::/kubepods/pod7\n")
        (ours / "memory.max").write_text(f"{most}\n")
        (ours / "memory.current").write_text(f"{used}\n")
        (ours / "memory.stat").write_text(f"anon 5\nfile 6\ninactive_file {cache}\n")
        (ours / "memory.pressure").write_text(PRESSURE.format(some="70.00", full=full))

    def version_1(self, *, most: int, used: int, cache: int) -> None:
        ours = self.groups / "docker/ab"
        ours.mkdir(parents=True)
        (self.proc / "self/mounts").write_text(
            f"cgroup {self.groups} cgroup rw,nosuid,relatime,memory 0 0\n"
        )
        (self.proc / "self/cgroup").write_text("5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n")
        (ours / "memory.limit_in_bytes").write_text(f"{most}\n")
        (ours / "memory.usage_in_bytes").write_text(f"{used}\n")
        (ours / "memory.stat").write_text(f"cache 6\ntotal_inactive_file {cache}\n")

    def ask(self) -> dict[str, Any]:
        command = module("memory", "--proc", str(self.proc))
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        said: dict[str, Any] = json.loads(done.stdout)
        return said


def test_version_2(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.version_2(most=str(64 * GIB), used=20 * GIB, cache=4 * GIB)
    said = proc.ask()
    assert said["ok"], said
    assert said["figures"] == {
        "total_bytes": 528280000 * 1024,
        "free_bytes": 400000000 * 1024,
        "cgroup_bytes": 64 * GIB,
        "cgroup_free_bytes": 48 * GIB,
        "waited_percent": 1.5,
        "stalled_percent": 0.25,
        "cgroup_waited_percent": 70.0,
        "cgroup_stalled_percent": 0.0,
    }


def test_version_1(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.version_1(most=8 * GIB, used=3 * GIB, cache=GIB)
    figures = proc.ask()["figures"]
    assert (figures["cgroup_bytes"], figures["cgroup_free_bytes"]) == (8 * GIB, 6 * GIB)


def test_no_limit_is_no_figure(tmp_path: Path) -> None:
    for name in ("one", "two"):
        proc = Proc(tmp_path / name)
        if name == "one":
            proc.version_1(most=9223372036854771712, used=3 * GIB, cache=GIB)
        else:
            proc.version_2(most="max", used=3 * GIB, cache=GIB)
        said = proc.ask()
        assert said["ok"]
        assert "cgroup_bytes" not in said["figures"], f"version {name}"


def test_a_cgroup_that_is_all_but_full(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.version_2(most=str(8 * GIB), used=8 * GIB - (1 << 20), cache=0)
    said = proc.ask()
    assert not said["ok"]
    assert said["what"] == "our cgroup has 1 MiB of memory left"
    assert said["figures"]["cgroup_bytes"] == 8 * GIB


def test_a_cgroup_that_does_nothing_but_wait(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.version_2(most="max", used=GIB, cache=0, full="93.10")
    assert proc.ask()["what"] == "all of our cgroup waited for memory in 93 % of the last 10 s"


def test_nothing_to_be_read(tmp_path: Path) -> None:
    done = subprocess.run(
        module("memory", "--proc", str(tmp_path)), capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)
    assert said["ok"]
    assert not said["figures"]
    assert said["what"]

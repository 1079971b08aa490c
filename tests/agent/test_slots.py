"""`--nproc-per-node` counted on this machine."""

import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from elastic.agent import slots
from elastic.proto.errors import UsageError

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_nvml_uuids", lambda: UUIDS)


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_nvml_uuids", list)


def fake_torch(folder: Path, source: str) -> dict[str, str]:
    (folder / "torch.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHON_EXEC": sys.executable}


def test_a_number_is_itself() -> None:
    assert slots.resolve_slots("12", {}) == 12


def test_cpus_as_torch_counts_them(tmp_path: Path) -> None:
    assert slots.cpu_count(tmp_path / "none", tmp_path) == torch._utils.cpu_count()
    assert slots.resolve_slots("cpu", {}) == slots.cpu_count()


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/", {"cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "9900000 100000"}, 8),
        ("0::/", {}, 8),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}, 2),
        ("0::/of/the/host", {"cpu.max": "400000 100000"}, 4),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (
            "4:cpu,cpuacct:/j\n0::/",
            {"cpu,cpuacct/j/cpu.cfs_quota_us": "200000", "cpu,cpuacct/j/cpu.cfs_period_us": "1000"},
            8,
        ),
        (
            "2:memory:/\n1:cpu:/j",
            {"cpu/j/cpu.cfs_quota_us": "500000", "cpu/j/cpu.cfs_period_us": "100000"},
            5,
        ),
    ],
)
def test_quota_of_the_cgroup(
    cgroup: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "self").write_text(cgroup + "\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    with mock.patch("os.sched_getaffinity", return_value=set(range(8))):
        assert slots.cpu_count(tmp_path / "self", tmp_path) == expected


VISIBLE = [
    "",
    "-1",
    "0",
    "0,1",
    "3,1,0",
    "0,-1,1",
    "0,9,1",
    "0,0",
    "1gpu,2b",
    "0, 2",
    "x",
    "NoDevFiles",
    "0,,1",
]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("visible", VISIBLE)
def test_visible_devices_as_torch_reads_them(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
    assert slots.gpu_count(os.environ) == torch.cuda._device_count_nvml()


@pytest.mark.usefixtures("four_gpus")
def test_gpu_and_auto_with_gpus() -> None:
    assert slots.resolve_slots("gpu", {}) == 4
    assert slots.resolve_slots("auto", {}) == 4
    assert slots.resolve_slots("auto", {"CUDA_VISIBLE_DEVICES": ""}) == slots.cpu_count()
    with pytest.raises(UsageError, match="with CUDA_VISIBLE_DEVICES=''"):
        slots.resolve_slots("gpu", {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.usefixtures("no_gpus")
def test_gpu_and_auto_without() -> None:
    with mock.patch.object(Path, "exists", return_value=False):
        assert slots.resolve_slots("auto", {}) == slots.cpu_count()
        with pytest.raises(UsageError, match="no GPU can be used here; give a number, or cpu"):
            slots.resolve_slots("gpu", {})


def test_nvml_is_asked() -> None:
    """Whatever this machine has, the answer is a list and no error."""
    assert all(uuid.startswith("GPU-") for uuid in slots._nvml_uuids())


def test_mig_and_amd_are_counted_by_torch(tmp_path: Path, no_gpus: None) -> None:
    environ = fake_torch(
        tmp_path,
        "class cuda:\n is_available = staticmethod(lambda: True)\n"
        " device_count = staticmethod(lambda: 3)\n",
    )
    assert slots.gpu_count({**environ, "CUDA_VISIBLE_DEVICES": "MIG-1"}) == 3
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    with mock.patch.object(Path, "exists", return_value=True):
        assert slots.gpu_count(environ) == 3


def test_other_devices_are_counted_by_torch(tmp_path: Path) -> None:
    environ = fake_torch(
        tmp_path,
        "print('a greeting')\nclass xpu:\n is_available = staticmethod(lambda: True)\n"
        " device_count = staticmethod(lambda: 6)\n",
    )
    assert slots.resolve_slots("xpu", environ) == 6
    with pytest.raises(UsageError, match="PyTorch finds no npu device here"):
        slots.resolve_slots("npu", environ)


def test_a_torch_that_cannot_be_asked(tmp_path: Path) -> None:
    environ = fake_torch(tmp_path, "raise ImportError('libxyz.so is missing')")
    with pytest.raises(UsageError, match=r"could not count xpu devices .*libxyz\.so is missing"):
        slots.resolve_slots("xpu", environ)
    with pytest.raises(UsageError, match="could not count xpu devices"):
        slots.resolve_slots("xpu", {**environ, "PYTHON_EXEC": str(tmp_path / "none")})

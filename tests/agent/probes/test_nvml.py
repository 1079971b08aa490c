"""The driver's word on a GPU, through a stand-in for `pynvml`: there is no GPU here."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.agent.probes.healthy import module

FAKE = """
class NVMLError(Exception):
    pass

NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_AGGREGATE_ECC = 1, 0, 1
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_TEMPERATURE_GPU = 230, 0
NVML_NVLINK_DEVICE_TYPE_SWITCH = 2
NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 36, 0, 1

class Memory:
    used, total = 1 << 30, 140 << 30

class Pci:
    busId = "00000000:3B:00.0"

class Field:
    nvmlReturn = 0
    class value:
        uiVal = 0

def nvmlInit(): pass
def nvmlDeviceGetHandleByIndex(index): return ("handle", index)
def nvmlDeviceGetHandleByUUID(uuid): return ("handle", uuid)
def nvmlDeviceGetTotalEccErrors(handle, error, counter): return 4 if counter == NVML_AGGREGATE_ECC else 0
def nvmlDeviceGetRemappedRows(handle): return (1, 0, 0, 0)
def nvmlDeviceGetFieldValues(handle, fields): return [Field]
def nvmlDeviceGetCurrentClocksEventReasons(handle): return 4
def nvmlDeviceGetTemperature(handle, sensor): return 41
def nvmlDeviceGetMemoryInfo(handle): return Memory
def nvmlDeviceGetComputeRunningProcesses(handle): return []
def nvmlDeviceGetNvLinkState(handle, link):
    if link > 17:
        raise NVMLError("Invalid Argument")
    return 1
def nvmlDeviceGetNvLinkRemoteDeviceType(handle, link): return 2
def nvmlDeviceGetNvLinkErrorCounter(handle, link, counter): return 0
def nvmlDeviceGetPciInfo(handle): return Pci
"""


def ask(folder: Path, change: str = "", device: str = "0") -> dict[str, Any]:
    """What the program says with a `pynvml` that does this besides."""
    (folder / "pynvml.py").write_text(FAKE + change)
    done = subprocess.run(
        module("nvml", device),
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = done.stdout.splitlines()
    said: dict[str, Any] = json.loads(line)
    return said


def test_a_healthy_gpu(tmp_path: Path) -> None:
    said = ask(tmp_path)
    assert said["ok"], said
    figures = said["figures"]
    assert figures["nvlinks_active"] == 18
    assert figures["nvlink_errors"] == 0
    assert figures["ecc_uncorrected_ever"] == 4
    assert figures["memory_used_bytes"] == 1 << 30
    assert figures["recovery_action"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("Field.value.uiVal = 1", "the driver asks for a reset of the GPU"),
        ("def nvmlDeviceGetRemappedRows(handle): return (0, 9, 0, 1)", "could not be remapped"),
        ("def nvmlDeviceGetCurrentClocksEventReasons(handle): return 0x80", "power brake"),
        (
            """
Field.nvmlReturn = 3
def nvmlDeviceGetTotalEccErrors(handle, error, counter): return 2
""",
            "2 uncorrected ECC errors",
        ),
        (
            "def nvmlDeviceGetHandleByIndex(index): raise NVMLError('GPU is lost')",
            "NVML cannot reach it: GPU is lost",
        ),
    ],
)
def test_a_sick_gpu(tmp_path: Path, change: str, words: str) -> None:
    said = ask(tmp_path, change)
    assert not said["ok"], said
    assert words in said["what"]


def test_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    """A GPU and a binding that are old: no recovery action, no links, no ECC, other names."""
    old = """
def unsupported(*args): raise NVMLError("Not Supported")
del NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, nvmlDeviceGetCurrentClocksEventReasons
nvmlDeviceGetTotalEccErrors = nvmlDeviceGetRemappedRows = nvmlDeviceGetNvLinkState = unsupported
def nvmlDeviceGetCurrentClocksThrottleReasons(handle): return 0
"""
    said = ask(tmp_path, old)
    assert said["ok"], said
    assert said["figures"]["clock_event_reasons"] == 0
    unknown = {"recovery_action", "ecc_uncorrected", "remap_pending", "nvlinks_active"}
    assert not unknown & said["figures"].keys()


@pytest.mark.parametrize(
    "change",
    [
        "def nvmlInit(): raise NVMLError('Driver Not Loaded')",
        "raise ImportError('Driver Not Loaded')",
    ],
)
def test_without_nvml_nothing_is_known(tmp_path: Path, change: str) -> None:
    said = ask(tmp_path, change)
    assert said["ok"]
    assert not said["figures"]
    assert "Driver Not Loaded" in said["what"]


def test_a_gpu_by_its_uuid(tmp_path: Path) -> None:
    change = "def nvmlDeviceGetHandleByIndex(index): raise NVMLError('by index')"
    assert ask(tmp_path, change, "GPU-5f")["ok"]

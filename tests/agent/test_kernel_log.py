"""Which lines of the kernel's log are told of a rank's end."""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.agent import kernel_log, xids
from elastic.agent.kernel_log import KernelLog, concerns, records, text
from elastic.master import symptoms

XID = "NVRM: Xid (PCI:0000:9C:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OOM = "Memory cgroup out of memory: Killed process 1234 (python) total-vm:1529680kB"
KILLER = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/job,task=python,pid=1234,uid=0"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """None outlives its test: it might yet import what another one has put into the place of `pynvml`."""
    yield
    for thread in threading.enumerate():
        if thread.name == "elastic-xids":
            thread.join(60)
            assert not thread.is_alive()


def test_only_what_the_kernel_says_counts() -> None:
    assert text(f"4,812,99,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:9c:00.0\n") == XID
    assert text(f"12,813,99,-;{XID}\n") == "", "a program wrote it there"
    assert text(f"6,814,99,-;{'x' * 1000}\n") == "x" * kernel_log.LENGTH
    assert text("nonsense") == ""


@pytest.mark.parametrize("line", [OOM, KILLER, OOM.replace("Memory cgroup o", "O")])
def test_whom_the_kernel_killed_for_memory(line: str) -> None:
    assert concerns(line, (), {77, 1234}, struck=False)
    assert not concerns(line, (), {77}, struck=False), "another job's"
    assert concerns(line, (), {77}, struck=True), "numbers of another namespace"


@pytest.mark.parametrize("line", [XID, "NVRM: GPU 0000:9c:00.0: GPU has fallen off the bus."])
def test_a_gpu_of_others_is_not_ours(line: str) -> None:
    assert concerns(line, {"0000:9c:00", "0000:1a:00"}, (), struck=False)
    assert not concerns(line, {"0000:1a:00"}, (), struck=False)
    assert not concerns(line, (), (), struck=True)


@pytest.mark.parametrize(
    ("visible", "ours"),
    [
        (None, "134"),
        ("", ""),
        ("0,2", "14"),
        (" 1 ", "3"),
        ("GPU-b2,GPU-c3-9", "34"),
        ("MIG-7", "134"),
    ],
)
def test_which_gpus_are_ours(visible: str | None, ours: str, tmp_path: Path) -> None:
    for bus, uuid in (("1", "GPU-a1"), ("3", "GPU-b2-8"), ("4", "GPU-c3-9")):
        gpu = tmp_path / f"0000:0{bus}:00.0"
        gpu.mkdir()
        (gpu / "information").write_text(f"Model: NVIDIA H200\nGPU UUID: \t {uuid}\n")
    assert kernel_log.usable(visible, tmp_path) == {f"0000:0{bus}:00" for bus in ours}


def test_gpus_that_a_cgroup_keeps_from_us_have_no_number(tmp_path: Path) -> None:
    """As Slurm counts: from 0 among those of the job."""
    dev = tmp_path / "dev"
    dev.mkdir()
    for minor in range(4):
        gpu = tmp_path / "gpus" / f"0000:0{minor}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"GPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n")
        if minor > 1:
            (dev / f"nvidia{minor}").touch()
    usable = partial(kernel_log.usable, folder=tmp_path / "gpus", dev=dev)
    assert usable("0") == {"0000:02:00"}
    assert usable(None) == {"0000:02:00", "0000:03:00"}


def test_details_of_what_was_corrected_hide_no_fault() -> None:
    """A record of firmware's about one error."""
    record = [f"{{1}}[Hardware Error]:   port_type: {n}, root port" for n in range(20)]
    fatal = "{1}[Hardware Error]: event severity: fatal"
    found = kernel_log.telling([*record, fatal, XID])
    assert found == [fatal, XID, *record[: kernel_log.LINES - 2]]


def test_the_machine_is_everybodys() -> None:
    assert concerns("mce: [Hardware Error]: Machine check events logged", (), (), struck=False)


def test_the_log_itself() -> None:
    """What is in it already says nothing of ranks that begin now."""
    try:
        fd = kernel_log.open_log()
    except OSError as error:
        pytest.skip(f"the kernel's log is not ours: {error.strerror}")
    try:
        assert any(text(record) for record in records(fd))
    finally:
        os.close(fd)

    async def ask() -> list[str]:
        ours = KernelLog()
        try:
            return ours.lines((), struck=False)
        finally:
            ours.close()

    assert asyncio.run(ask()) == []


def test_a_file_in_its_place_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some containers have; it would always be readable."""
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", "/dev/null")
    fd = kernel_log.open_log()
    try:
        with pytest.raises(OSError, match="is no kernel's log"):
            list(islice(records(fd), 3))
    finally:
        os.close(fd)


def test_without_the_log_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> list[str]:
        ours = KernelLog()
        try:
            return ours.lines((), struck=True)
        finally:
            ours.close()

    monkeypatch.setattr(kernel_log, "KERNEL_LOG", "/nowhere/kmsg")
    assert asyncio.run(ask()) == []


class Driver:
    """A stand-in for `pynvml`: of its two GPUs the second has faults, which come as they are told to."""

    class NVMLError(Exception):
        pass

    class NVMLError_Timeout(NVMLError):
        pass

    class NVMLError_GpuIsLost(NVMLError):
        pass

    nvmlEventTypeXidCriticalError, NVML_TEMPERATURE_GPU = 8, 0
    lost = False

    def __init__(self) -> None:
        self.faults = queue.Queue[int]()
        self.registered: list[int] = []
        self.freed = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return {
            "nvmlInit": lambda: None, "nvmlEventSetCreate": lambda: "events",
            "nvmlDeviceGetCount": lambda: 2, "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceRegisterEvents": self.register, "nvmlEventSetWait_v2": self.wait,
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(domain=0, bus=0x9C, device=handle),
            "nvmlDeviceGetTemperature": self.temperature,
            "nvmlEventSetFree": lambda events: None, "nvmlShutdown": self.freed.set,
        }[name]  # fmt: skip

    def register(self, handle: int, kinds: int, events: str) -> None:
        if handle == 0:
            raise self.NVMLError("Not Supported")
        self.registered.append(handle)

    def temperature(self, handle: int, sensor: int) -> int:
        if self.lost:
            raise self.NVMLError_GpuIsLost
        return 41

    def wait(self, events: str, patience_ms: int) -> SimpleNamespace:
        if self.lost:  # each wait fails from then on
            raise self.NVMLError_GpuIsLost
        try:
            xid = self.faults.get(timeout=0.01)
        except queue.Empty:
            raise self.NVMLError_Timeout from None
        return SimpleNamespace(device=1, eventType=8, eventData=xid)


async def heard(ours: KernelLog, count: int) -> list[str]:
    async with asyncio.timeout(60):
        while len(found := ours.lines((), struck=False)) < count:
            await asyncio.sleep(0.01)
    return found


def test_a_gpu_that_is_lost_ends_nvmls_waits_and_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    driver.lost = True
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", str(tmp_path / "none"))
    monkeypatch.setattr(xids, "PATIENCE_MS", 10)
    monkeypatch.setitem(sys.modules, "pynvml", driver)

    async def ask() -> list[str]:
        ours = KernelLog()
        try:
            await heard(ours, 1)
            await asyncio.sleep(0.1)  # it has looked some times more
            return ours.lines((), struck=False)
        finally:
            ours.close()

    (line,) = asyncio.run(ask())
    assert line == "NVRM: Xid (PCI:0000:9c:01): 79, by NVML"


def test_where_the_log_is_not_ours_nvml_tells_of_xids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "pynvml", driver)

    async def ask() -> list[str]:
        ours = KernelLog()
        try:
            assert ours.lines((), struck=False) == []
            driver.faults.put(79)
            await heard(ours, 1)
            driver.faults.put(154)
            return await heard(ours, 2)
        finally:
            ours.close()

    lines = asyncio.run(ask())
    assert lines == [f"NVRM: Xid (PCI:0000:9c:01): {xid}, by NVML" for xid in (79, 154)]
    found = symptoms.first_xid(symptoms.XIDS, lines)
    assert found is not None
    assert found.label == "gpu_lost"
    assert driver.registered == [1], "the other one knows no events"
    assert driver.freed.wait(60)


def test_neither_a_log_nor_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", str(tmp_path / "none"))
    monkeypatch.setitem(sys.modules, "pynvml", None)

    async def ask() -> list[str]:
        ours = KernelLog()
        for thread in threading.enumerate():
            if thread.name == "elastic-xids":
                await asyncio.to_thread(thread.join)
        try:
            return ours.lines((), struck=False)
        finally:
            ours.close()

    assert asyncio.run(ask()) == []


@pytest.mark.gpu
def test_a_driver_tells_of_what_a_program_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is none, which an assertion on the device finds."""
    monkeypatch.setattr(kernel_log, "KERNEL_LOG", str(tmp_path / "none"))
    script = (
        "import torch\nnumbers = torch.zeros(4, device='cuda')\n"
        "numbers[torch.tensor([9], device='cuda')].sum().item()"
    )

    async def ask() -> list[str]:
        ours = KernelLog()
        try:
            run = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
            assert await run.wait() == 1
            return await heard(ours, 1)
        finally:
            ours.close()

    (line, *_) = asyncio.run(ask())
    found = symptoms.first_xid(symptoms.XIDS_OF_PROGRAMS, [line])
    assert found is not None, line
    assert found.label == "device_error", line

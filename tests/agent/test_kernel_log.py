"""Which lines of the kernel's log are told of a rank's end."""

import asyncio
import os
from itertools import islice

import pytest

from elastic.agent import kernel_log
from elastic.agent.kernel_log import KernelLog, concerns, records, text

XID = "NVRM: Xid (PCI:0000:9C:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OOM = "Memory cgroup out of memory: Killed process 1234 (python) total-vm:1529680kB"
KILLER = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/job,task=python,pid=1234,uid=0"


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

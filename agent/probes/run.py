"""Probe this node: a process for each device, disk and the rest, each answer with a deadline, those at once that do not
disturb one another. Imports no torch.
"""

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.agent.probes.answers import CONTEXT, Answer
from elastic.agent.probes.process import ONE_THREAD, Program
from elastic.agent.probes.verdicts import NodeVerdict, Part, ProbeVerdict, compared, of_answer
from elastic.agent.visible_devices import visible_devices

ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML counts
    "NCCL_SOCKET_IFNAME": "lo",  # what is asked is how a node's GPUs reach one another,
    "NCCL_NET": "Socket",  # and to look for network cards takes longer than all else
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",  # saves 0.2 s of the first collective
}
"""Of the probes of devices; what is set stays."""
FIXED = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same kernel each time
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else who only lost a peer dies of it, and is accused
}
"""Of them too, whatever is set."""


LEAVING = 10.0
"""Seconds that a healthy process has to give its device back, once it was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that an answer may take, far above what a healthy node needs."""

    torch: float
    """To import it."""
    device: float
    """A step on a device."""
    other: float
    """Disk, counters."""


LIMITS = {
    "quick": Limits(torch=90.0, device=30.0, other=15.0),
    "full": Limits(torch=90.0, device=180.0, other=90.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    label: str
    """`gpu0`, `cpu`."""
    torch: str
    """Its name in torch: `cpu`; `cuda:0`, for no process of ours sees another one."""
    nvml: str
    """Its index or UUID; empty: it is no GPU."""


def devices(environ: Mapping[str, str], dev: Path = Path("/dev")) -> tuple[Device, ...]:
    """The GPUs that may be used here; the CPU where there are none."""
    there = [file for file in dev.glob("nvidia[0-9]*") if file.name[6:].isdecimal()]
    names = visible_devices(environ.get("CUDA_VISIBLE_DEVICES"), [""] * len(there))
    return tuple(
        Device(label=f"gpu{name}" if name.isdecimal() else name, torch="cuda:0", nvml=name)
        for name in names
    ) or (Device(label="cpu", torch="cpu", nvml=""),)


async def probe(
    level: str, *, devices: Sequence[Device], folders: Sequence[Path], environ: Mapping[str, str]
) -> NodeVerdict:
    """Everything once, from nothing."""
    prober = Prober(level, devices=devices, folders=folders, environ=environ)
    return await prober.probe()


class Prober:
    """One look at a node. `prepare` ahead of it imports torch and opens the driver, and makes no context: then `probe` takes
    no longer than what it tries. Its processes are children of ours, by the pids in `pids`."""

    def __init__(
        self,
        level: str,
        *,
        devices: Sequence[Device],
        folders: Sequence[Path],
        environ: Mapping[str, str],
        limits: Limits | None = None,
        python: str = sys.executable,
    ) -> None:
        """python: whose torch is to be used."""
        self._level = level
        self._devices = tuple(devices)
        self._folders = tuple(folders)
        self._environ = environ
        self._python = python
        self._limits = limits or LIMITS[level]
        self._programs: dict[Device, Program] = {}
        self._drivers: dict[Device, Program] = {}
        """That ask NVML. They stay, so that a driver that nobody else uses does not shut down a GPU in between."""
        self._others: set[Program] = set()
        self._out: set[Device] = set()
        """With a fault, or no context: nothing more is tried on them."""
        self._found: list[ProbeVerdict] = []
        self._used: dict[Device, Mapping[str, float]] = {}
        """What NVML has said of who is on it, before we were."""
        self._parts: list[tuple[str, str, float, float]] = []
        """Of each its name, device, beginning and end."""

    @property
    def pids(self) -> set[int]:
        """Of processes that run, or could not be ended."""
        programs = (*self._programs.values(), *self._drivers.values(), *self._others)
        return {program.pid for program in programs}

    async def prepare(self) -> None:
        """Import torch for each device, and begin to open its driver."""
        if not self._programs:
            self._start()
            await self._all("torch", self._limits.torch, ask=False)

    def _start(self) -> None:
        """Each device's processes. Raises OSError."""
        environ = {**ENVIRONMENT, **self._environ, **FIXED}
        world = len(self._devices)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            for rank, device in enumerate(self._devices):
                own = environ
                if device.nvml:
                    # It sees no other: a driver takes its time for each that a process sees. Its host computes little,
                    # and to start a thread for each core, in all processes at once, takes longer.
                    own = {**ONE_THREAD, **environ, "CUDA_VISIBLE_DEVICES": device.nvml}
                args = ["--device", device.torch, "--level", self._level]
                fds = []
                if world > 1:
                    args += ["--rank", str(rank), "--world", str(world), "--port", str(port)]
                    if rank == 0:
                        args, fds = [*args, "--listen", "3"], [listening.fileno()]
                self._programs[device] = Program("device", args, own, fds, self._python)
        for device in self._devices:
            if device.nvml:
                args = ["--level", self._level, "--steps", device.nvml]
                self._drivers[device] = Program("nvml", args, self._environ)

    async def probe(self, free: Awaitable[None] | None = None) -> NodeVerdict:
        """Try everything; the processes are gone then, but for those that nothing ends. Raises OSError
        where none can be started.

        free: comes once nobody else uses the devices; torch is imported before, and the probe begins then.
        """
        preparing = asyncio.create_task(self.prepare())
        beside = [preparing]
        try:
            if free is not None:
                await free
            began = time.monotonic()
            # What the second asks was started by `prepare`, which goes on.
            beside += [
                look := asyncio.create_task(self._look()),
                use := asyncio.create_task(self._ask_use()),
            ]
            await use  # then what NVML has seen on a GPU is not ours
            for program in self._programs.values():
                program.say(CONTEXT)
            await preparing
            beside.append(counters := asyncio.create_task(self._ask_counters()))
            await _at_once(*(self._open(device) for device in self._alive()))
            await look  # then nothing takes the time that is measured
            await self._try_devices()
            await counters
            seconds = time.monotonic() - began
        finally:
            await _cancelled(beside)
            await self.close()
        probes = compared(self._found)
        return NodeVerdict(
            level=self._level, probes=probes, seconds=seconds, parts=self._parts_since(began)
        )

    async def close(self) -> None:
        """End its processes."""
        ending = [
            (kind, device, program)
            for kind, programs in (("device", self._programs), ("nvml", self._drivers))
            for device, program in programs.items()
            if not program.end
        ]
        await asyncio.gather(*(self._close(f"{k} gone", d.label, p) for k, d, p in ending))
        self._programs = {d: p for d, p in self._programs.items() if p.left_behind}
        self._drivers = {d: p for d, p in self._drivers.items() if p.left_behind}

    async def _close(self, name: str, device: str, program: Program) -> None:
        began = time.monotonic()
        await program.close(LEAVING)
        self._parts.append((name, device, began, time.monotonic()))

    def _parts_since(self, began: float) -> tuple[Part, ...]:
        parts = (
            Part(name=name, device=device, began=first - began, seconds=last - first)
            for name, device, first, last in self._parts
        )
        return tuple(sorted(parts, key=lambda part: part.began))

    # --- what does not disturb ---------------------------------------------------------------------

    async def _look(self) -> None:
        """Memory and disks, all at once."""
        level = ["--level", self._level]
        wanted = [("memory", "", level)]
        wanted += [("disk", str(folder), [*level, str(folder)]) for folder in self._folders]
        await _at_once(*(self._other(*one) for one in wanted))

    async def _other(self, probe: str, device: str, args: Sequence[str]) -> None:
        began = time.monotonic()
        program = Program(probe, args, self._environ)
        self._others.add(program)
        try:
            answer = await program.only_answer(probe, self._limits.other)
            self._note(device, answer)
            self._time(probe, device, began, answer)
        except asyncio.CancelledError:
            await program.close()
            raise
        finally:
            if not program.left_behind:
                self._others.discard(program)

    async def _ask_use(self) -> None:
        """NVML, who is on each GPU."""
        await _at_once(*(self._ask_driver(device, "nvml_use") for device in self._drivers))

    async def _ask_counters(self) -> None:
        """NVML, all else."""
        await _at_once(*(self._ask_driver(device, "nvml") for device in self._used))

    async def _ask_driver(self, device: Device, step: str) -> None:
        program, began = self._drivers[device], time.monotonic()
        program.say(step)
        first = step == "nvml_use"  # a driver that nobody else uses has all GPUs to initialise
        answer = await program.answer(step, self._limits.device if first else self._limits.other)
        self._time(step, device.label, began, answer)
        if first and answer.ok:
            self._used[device] = answer.figures
            return
        figures = {**self._used.get(device, {}), **answer.figures}
        self._note(device.label, replace(answer, probe="nvml", figures=figures))

    # --- devices -----------------------------------------------------------------------------------

    async def _open(self, device: Device) -> None:
        """A context, and what its first product needs; each as soon as it can, for a driver makes one after the
        other."""
        self._note_step(device, await self._ask(device, "device"))
        if device not in self._out:
            answer = await self._ask(device, "product")
            if not answer.ok:  # one that has no memory left says so of what is tried next
                first = "matmul_together" if len(self._devices) > 1 else "matmul"
                self._note_step(device, replace(answer, probe=first))

    async def _try_devices(self) -> None:
        """Together first, then one by one, with the others idle."""
        if len(self._alive()) > 1:
            await self._all("matmul_together")
        await self._each("matmul")
        await self._all("bandwidth")
        if any(device.nvml for device in self._devices):
            if len(self._alive()) > 1:
                await self._all("copies_together")
            await self._each("copies")
        if len(self._devices) > 1:
            await self._collectives()

    def _alive(self) -> list[Device]:
        return [device for device in self._devices if device not in self._out]

    async def _all(self, probe: str, timeout: float | None = None, *, ask: bool = True) -> None:
        """A step on all devices at once."""
        devices = self._alive()
        answers = await asyncio.gather(*(self._ask(d, probe, timeout, ask=ask) for d in devices))
        for device, answer in zip(devices, answers, strict=True):
            self._note_step(device, answer)

    async def _each(self, probe: str) -> None:
        """A step on one device after another."""
        for device in self._alive():
            self._note_step(device, await self._ask(device, probe))

    async def _ask(
        self, device: Device, probe: str, timeout: float | None = None, *, ask: bool = True
    ) -> Answer:
        program, began = self._programs[device], time.monotonic()
        if ask:
            program.say(probe)
        limit = self._limits.device if timeout is None else timeout
        answer = await program.answer(probe, limit)
        self._time(probe, device.label, began, answer)
        return answer

    async def _collectives(self) -> None:
        """One verdict for the node, or of those devices whose processes were seen to fail: that the others
        then wait is no fault of theirs."""
        if len(self._alive()) < len(self._devices):
            gone = [device.label for device in self._devices if device in self._out]
            what = f"not tried: there was no going on with {', '.join(gone)}"
            self._note("", Answer(probe="collectives", ok=True, what=what))
            return
        if any(device.nvml.startswith("MIG-") for device in self._devices):
            what = "not tried: NCCL takes instances of one GPU for the same"
            self._note("", Answer(probe="collectives", ok=True, what=what))
            return
        answers = await asyncio.gather(*(self._ask(d, "collectives") for d in self._devices))
        told = list(zip(self._devices, answers, strict=True))
        broken = [
            (d, a)
            for d, a in told
            if self._programs[d].end in ("stopped", "stuck", "died", "nonsense")
        ]
        for device, answer in broken:
            self._note(device.label, answer)
        if not broken:
            self._note("", _together(told))

    def _note_step(self, device: Device, answer: Answer) -> None:
        """torch and a context on the device are no probes, and only told of where they fail."""
        setup = answer.probe in ("torch", "device")
        if not answer.ok or (setup and not answer.figures):
            self._out.add(device)
        elif setup:
            return
        self._note(device.label, answer)

    def _note(self, device: str, answer: Answer) -> None:
        self._found.append(of_answer(answer, device))

    def _time(self, step: str, device: str, began: float, answer: Answer) -> None:
        self._parts.append((step, device, began, time.monotonic()))
        for name, (first, last) in answer.parts.items():
            self._parts.append((f"{step}: {name}", device, first, last))


async def _at_once(*work: Coroutine[Any, Any, None]) -> None:
    """All at once; where one fails the others are ended before that is raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def _together(told: Sequence[tuple[Device, Answer]]) -> Answer:
    """What a collective's ranks say, as one: it is as fast as the slowest of them says."""
    bad = [f"{device.label}: {answer.what}" for device, answer in told if not answer.ok]
    if bad:
        return Answer(probe="collectives", ok=False, what="; ".join(bad))
    if silent := [answer for _, answer in told if not answer.figures]:
        return replace(silent[0], probe="collectives")
    names = told[0][1].figures
    slowest = {name: min(answer.figures[name] for _, answer in told) for name in names}
    return Answer(probe="collectives", ok=True, figures=slowest)

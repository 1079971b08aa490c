"""Probing in tests: the devices that stand in for GPUs, and faults put into a probe's process.

A fault is a `sitecustomize` on the PYTHONPATH of the probes alone: whatever Python does at its start,
before any module of ours, which then fails as broken hardware would have it fail.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic.agent.probes.run import Device, Limits, Prober
from elastic.agent.probes.verdicts import NodeVerdict, ProbeVerdict

CPU = Device(label="cpu", torch="cpu", nvml="")
PAIR = tuple(Device(label=f"cpu{rank}", torch="cpu", nvml="") for rank in (0, 1))

GENEROUS = Limits(torch=100.0, device=100.0, other=100.0)

CORRUPTS = """
mm = torch.mm
def corrupting(*args, **kwargs):
    product = mm(*args, **kwargs)
    product.view(torch.int32)[0, 0] ^= 1 << 3
    return product
torch.mm = corrupting
"""
"""Of all products one element is wrong."""

IN_PROBE = """
import sys
def in_probe(name, *args):
    words = sys.orig_argv
    return f"elastic.agent.probes.{name}" in words and all(a in words for a in args)
"""

WHEN_TORCH_IS_THERE = """
import importlib.abc, importlib.util
class Spoil(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    # Once the module of ours that uses it is imported, torch is whole.
    def find_spec(self, name, path, target=None):
        if name != "elastic.agent.probes.matmul":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            spoil()
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Spoil())
"""


def environ(folder: Path, fault: str = "", *, torch_fault: str = "") -> dict[str, str]:
    """Of probes with this fault: code that runs at their start, or the body of a function that runs once
    torch is imported in the processes of devices."""
    code = IN_PROBE + fault
    if torch_fault:
        body = "\n".join(f"    {line}" for line in torch_fault.strip().splitlines())
        code += (
            f"\ndef spoil():\n    import os, signal, time, torch\n{body}\n" + WHEN_TORCH_IS_THERE
        )
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def probe(
    environ: dict[str, str],
    *,
    devices: Sequence[Device] = (CPU,),
    folders: Sequence[Path] = (),
    limits: Limits = GENEROUS,
) -> tuple[NodeVerdict, set[int]]:
    """The verdict, and the pids that are left."""

    async def main() -> tuple[NodeVerdict, set[int]]:
        prober = Prober("quick", devices=devices, folders=folders, environ=environ, limits=limits)
        return await prober.probe(), prober.pids

    return asyncio.run(main())


def faults(verdict: NodeVerdict) -> dict[tuple[str, str], str]:
    """What is wrong, by probe and device."""
    return {(fault.probe, fault.device): fault.what for fault in verdict.faults}


def by_name(verdict: NodeVerdict) -> dict[tuple[str, str], ProbeVerdict]:
    return {(one.probe, one.device): one for one in verdict.probes}


def module(name: str, *args: str) -> list[str]:
    return [sys.executable, "-m", f"elastic.agent.probes.{name}", *args]

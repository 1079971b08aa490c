"""Test this node with others, two by two: a process of `pair.py` for each of its devices, as one answer."""

import asyncio
import json
from collections.abc import Mapping, Sequence

from elastic.agent.probes.answers import Answer
from elastic.agent.probes.process import ONE_THREAD, Program
from elastic.agent.probes.run import ENVIRONMENT, Device
from elastic.proto import master_pb2 as pb

ORDER = "CUDA_DEVICE_ORDER"
LATE = 10.0
"""Seconds beyond its deadline for a process to end."""


class Testing:
    """One node's part in the tests that are asked of it. Its processes are children of ours, by the pids in `pids`."""

    def __init__(
        self, asked: pb.Pairs, devices: Sequence[Device], environ: Mapping[str, str], python: str
    ) -> None:
        """devices: this node's; python: whose torch is to be used."""
        self._asked = asked
        self._devices = devices[: asked.devices]
        self._python = python
        self._environ = environ
        self._programs: list[Program] = []

    @property
    def pids(self) -> set[int]:
        return {program.pid for program in self._programs}

    async def run(self) -> pb.Paired:
        """Raises OSError where no process can be started."""
        asked = self._asked
        if len(asked.stores) != len(asked.first):  # as a master of another release asks
            return pb.Paired(state="unknown", what="it was not told where to meet the others")
        if len(self._devices) < asked.devices:
            return pb.Paired(state="unknown", what="it has fewer devices than it had")
        pairs = ",".join(f"{a}-{b}" for a, b in zip(asked.first, asked.second, strict=True))
        first = asked.node * asked.devices
        try:
            for local, device in enumerate(self._devices):
                args = [
                    *("--stores", ",".join(asked.stores), "--prefix", asked.prefix),
                    *("--pairs", pairs),
                    *("--rank", str(first + local), "--world", str(asked.nodes * asked.devices)),
                    *("--per-node", str(asked.devices), "--device", asked.device),
                    *("--deadline", str(asked.deadline)),
                ]
                environ = {**ONE_THREAD, ORDER: ENVIRONMENT[ORDER], **self._environ}
                environ["CUDA_VISIBLE_DEVICES"] = device.nvml  # nodes and ranks may share a machine
                self._programs.append(Program("pair", args, environ, python=self._python))
            told = await asyncio.gather(*(self._told(program) for program in self._programs))
        finally:
            await asyncio.gather(*(program.close() for program in self._programs))
            self._programs = [program for program in self._programs if program.left_behind]
        return of_all(told, self._devices)

    async def _told(self, program: Program) -> pb.Paired:
        line = await program.line("pair", self._asked.deadline + LATE)
        return pb.Paired(state="faulty", what=line.what) if isinstance(line, Answer) else read(line)


def read(line: bytes) -> pb.Paired:
    """What one device's process says, in one line of JSON, as `pair.py` prints it; whatever else comes is a fault."""
    found = pb.Paired(state="ok")
    try:
        said = json.loads(line)
        figures, what = said["figures"], str(said["what"])
        if figures["alone"]:  # torch's error where somebody else has the memory
            return pb.Paired(state="unknown" if "OutOfMemoryError" in what else "faulty", what=what)
        if "matmul_s" in figures:
            found.matmul.append(float(figures["matmul_s"]))
        for one in figures["pairs"]:
            found.tests.add(
                passed=one["outcome"] == "passed",
                late=one["outcome"] == "timed out",
                what=str(one["what"]),
                gather=float(one.get("gather_s", 0.0)),
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        return pb.Paired(state="faulty", what=f"it printed {line[:100]!r}")
    return found


def of_all(told: Sequence[pb.Paired], devices: Sequence[Device]) -> pb.Paired:
    """A node works as well as the worst of its devices."""
    for state in ("faulty", "unknown"):
        for device, one in zip(devices, told, strict=True):
            if one.state == state:
                gpu = int(device.nvml) if device.nvml.isdecimal() else None
                return pb.Paired(state=state, what=one.what, gpu=gpu)
    matmul = [seconds for one in told for seconds in one.matmul]
    tests = [_worst(of_pair) for of_pair in zip(*(one.tests for one in told), strict=False)]
    return pb.Paired(state="ok", matmul=matmul if len(matmul) == len(told) else [], tests=tests)


def _worst(tests: Sequence[pb.Paired.Test]) -> pb.Paired.Test:
    failed = [test for test in tests if not test.passed]
    return failed[0] if failed else max(tests, key=lambda test: test.gather)

"""Test this node with others, two by two: a process of `pair.py` for each of its devices, as one answer."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.agent.probes.answers import Answer
from elastic.agent.probes.process import Program
from elastic.agent.probes.verdicts import State

LATE = 10.0
"""Seconds beyond its deadline for a process to end."""
CPU = {"OMP_NUM_THREADS": "1"}
"""Several nodes may share a machine; what is set stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is asked."""

    store: str
    """host:port, at which they meet."""
    prefix: str
    node: int
    """Which this one is."""
    nodes: int
    pairs: tuple[tuple[int, int], ...]
    """In the order in which they are tested."""
    device: str
    """cpu or cuda."""
    devices: int
    """Of each node that take part."""
    deadline: float
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """How one pair did."""

    passed: bool
    late: bool = False
    """Not passed: it only waited for the other."""
    what: str = ""
    gather: float = 0.0
    """Seconds of an allgather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What one device's process says."""

    state: State
    """Of its own part; unknown: nothing could be tested."""
    what: str = ""
    matmul: float = 0.0
    """Seconds of one; 0: not known."""
    tests: tuple[Tested, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What all of them say."""

    state: State
    what: str = ""
    device: int | None = None
    """Where that was."""
    matmul: tuple[float, ...] = ()
    tests: tuple[Tested, ...] = ()


class Testing:
    """One node's part in the tests of a group. Its processes are children of ours, by the pids in `pids`."""

    def __init__(self, group: Group, environ: Mapping[str, str], python: str) -> None:
        """python: whose torch is to be used."""
        self._group = group
        self._python = python
        self._environ = environ
        self._programs: list[Program] = []

    @property
    def pids(self) -> set[int]:
        return {program.pid for program in self._programs}

    async def run(self) -> Found:
        """Raises OSError where no process can be started."""
        group = self._group
        pairs = ",".join(f"{a}-{b}" for a, b in group.pairs)
        first = group.node * group.devices
        try:
            for local in range(group.devices):
                args = [
                    *("--store", group.store, "--prefix", group.prefix, "--pairs", pairs),
                    *("--rank", str(first + local), "--world", str(group.nodes * group.devices)),
                    *("--per-node", str(group.devices), "--device", group.device),
                    *("--deadline", str(group.deadline)),
                ]
                environ = self._environ if group.device == "cuda" else {**CPU, **self._environ}
                self._programs.append(Program("pair", args, environ, python=self._python))
            told = await asyncio.gather(*(self._told(program) for program in self._programs))
        finally:
            await asyncio.gather(*(program.close() for program in self._programs))
            self._programs = [program for program in self._programs if program.left_behind]
        return of_all(told)

    async def _told(self, program: Program) -> Told:
        line = await program.line("pair", self._group.deadline + LATE)
        if isinstance(line, Answer):
            return Told(state="faulty", what=line.what)
        return read(line)


def read(line: bytes) -> Told:
    """One line of JSON, as `pair.py` says it prints; whatever else comes is a fault."""
    try:
        said = json.loads(line)
        figures, what = said["figures"], str(said["what"])
        matmul = float(figures.get("matmul_s", 0.0))
        if figures["alone"]:  # torch's error where somebody else has the memory
            unknown = "OutOfMemoryError" in what
            return Told(state="unknown" if unknown else "faulty", what=what, matmul=matmul)
        tests = tuple(_tested(one) for one in figures["pairs"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return Told(state="faulty", what=f"it printed {line[:100]!r}")
    return Told(state="ok", matmul=matmul, tests=tests)


def _tested(said: Mapping[str, Any]) -> Tested:
    return Tested(
        passed=said["outcome"] == "passed",
        late=said["outcome"] == "timed out",
        what=str(said["what"]),
        gather=float(said.get("gather_s", 0.0)),
    )


def of_all(told: Sequence[Told]) -> Found:
    """A node works as well as the worst of its devices."""
    for state in ("faulty", "unknown"):
        for device, one in enumerate(told):
            if one.state == state:
                where = device if len(told) > 1 else None
                return Found(state=one.state, what=one.what, device=where)
    tests = tuple(_worst(of_pair) for of_pair in zip(*(one.tests for one in told), strict=False))
    matmul = tuple(one.matmul for one in told)
    return Found(state="ok", matmul=matmul if all(matmul) else (), tests=tests)


def _worst(tests: Sequence[Tested]) -> Tested:
    failed = [test for test in tests if not test.passed]
    return failed[0] if failed else max(tests, key=lambda test: test.gather)

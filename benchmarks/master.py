"""One master and thousands of simulated agents: join to everyone told, one node replaced.

The master is a process of its own with its journal on a disk, reached over loopback TCP alone. The
agents (agents.py) are another, with a connection each; both share the machine's cores.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import ROOT
from benchmarks.table import Row, Sample
from elastic.master import main as program
from elastic.master.policy import Policy
from elastic.proto.security import Security

SIZES = (1_000, 4_000, 10_240)
RUN_ID = "benchmark"
START_S = 20.0
SETTLE_S = 3.0
"""Seconds until what every agent said after the round began has been heard."""
STEADY_S = 15.0
"""Seconds of nothing but heartbeats, over which the master's share of a core is taken."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True)
class Figures:
    """What is measured of one kind of master at one size."""

    join: Sample
    cold: Sample
    restart: Sample
    replace: Sample
    memory: Sample
    memory_again: Sample
    share: Sample


def rows(sizes: Sequence[int], n: int, *, bare: bool) -> list[Row]:
    """`n` masters of each size, Elastic's and the bare one in turn."""
    found: list[Row] = []
    for nodes in sizes:
        kinds = {"elastic": _figures("elastic")}
        if bare:
            kinds["bare grpc.aio"] = _figures("bare grpc.aio")
        for number in range(n):
            for kind, figures in kinds.items():
                _once(
                    nodes, kind, figures, STEADY_S if kind == "elastic" and number == n - 1 else 0.0
                )
        measures = {
            "join to everyone told": "join",
            "the same, connecting included": "cold",
            "the master killed, to everyone told again": "restart",
            "one node replaced": "replace",
            "memory of the master": "memory",
            "memory of one that was started again": "memory_again",
            "its share of a core, heartbeats only": "share",
        }
        ours, *peers = kinds.values()
        for what, field in measures.items():
            samples = [getattr(figures, field) for figures in (ours, *peers)]
            if samples[0].tries:
                others = [sample for sample in samples[1:] if sample.tries]
                found.append(
                    Row(measure=f"{nodes:,} agents: {what}", ours=samples[0], peers=others)
                )
    return found


def _figures(launcher: str) -> Figures:
    return Figures(
        join=Sample(launcher=launcher),
        cold=Sample(launcher=launcher),
        restart=Sample(launcher=launcher),
        replace=Sample(launcher=launcher),
        memory=Sample(launcher=launcher, unit="MB"),
        memory_again=Sample(launcher=launcher, unit="MB"),
        share=Sample(launcher=launcher, unit="%"),
    )


def _once(nodes: int, kind: str, figures: Figures, steady: float) -> None:
    """One master's life."""
    with (
        tempfile.TemporaryDirectory(prefix="bench_master_") as folder,
        _master(kind, nodes, Path(folder), _free_port()) as (first, port),
        _agents(port) as agents,
        ExitStack() as second,
    ):
        master = first
        try:
            connected = _ask(agents, verb="connect", count=nodes)
            joined = _ask(agents, verb="attach", round=1)
            figures.memory.add(_peak_memory(first.pid))
            if kind == "elastic":
                time.sleep(SETTLE_S)
                killed = time.monotonic()
                first.kill()
                first.wait()
                _ask(agents, verb="drop")
                master, _ = second.enter_context(_master(kind, nodes, Path(folder), port))
                _ask(agents, verb="connect", count=nodes)
                figures.restart.add(_ask(agents, verb="attach", round=1)["ended"] - killed)
            _ask(agents, verb="connect", count=1)
            _ask(agents, verb="attach", round=0)
            time.sleep(SETTLE_S)
            if steady:
                figures.share.add(_share(master.pid, steady))
            replaced = _ask(agents, verb="replace", round=2)
        except RuntimeError as error:
            for sample in (figures.join, figures.cold, figures.restart, figures.replace):
                sample.fail(str(error))
            return
        join = joined["ended"] - joined["began"]
        figures.join.add(join)
        figures.cold.add(join + connected["ended"] - connected["began"])
        figures.replace.add(replaced["ended"] - replaced["began"])
        if master is not first:
            figures.memory_again.add(_peak_memory(master.pid))


@contextmanager
def _master(
    kind: str, nodes: int, folder: Path, port: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    module = "benchmarks.master" if kind == "elastic" else "benchmarks.bare_master"
    with (folder / "master.log").open("ab") as console:
        master = subprocess.Popen(
            [sys.executable, "-m", module, str(port), str(nodes), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
    try:
        _wait_for(port, master)
        yield master, port
    finally:
        master.kill()
        master.wait()


@contextmanager
def _agents(port: int) -> Iterator[subprocess.Popen[str]]:
    agents = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.agents", str(port), RUN_ID],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        yield agents
    finally:
        agents.kill()
        agents.communicate()


def _ask(agents: subprocess.Popen[str], **command: object) -> dict[str, float]:
    """One command to the agents, and its answer."""
    assert agents.stdin is not None
    assert agents.stdout is not None
    agents.stdin.write(json.dumps(command) + "\n")
    agents.stdin.flush()
    line = agents.stdout.readline()
    if not line:
        raise RuntimeError(f"the agents ended during {command}")
    answer: dict[str, float] = json.loads(line)
    return answer


def _wait_for(port: int, master: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and master.poll() is None:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        time.sleep(0.02)
    raise RuntimeError("the master did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _peak_memory(pid: int) -> float:
    """Megabytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("no VmHWM in /proc")


def _share(pid: int, seconds: float) -> float:
    """Per cent of one core over the next `seconds`."""
    before = _cpu_seconds(pid)
    time.sleep(seconds)
    return 100 * (_cpu_seconds(pid) - before) / seconds


def _cpu_seconds(pid: int) -> float:
    """User and system time so far, of all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def _serve(port: int, nodes: int, folder: Path) -> int:
    settings = program.MasterSettings(
        run_id=RUN_ID,
        address=f"127.0.0.1:{port}",
        run_dir=folder,
        policy=Policy(min_nodes=nodes, max_nodes=nodes),
        security=Security(),
        launch=RUN_ID,
    )
    return program.main(settings)


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))

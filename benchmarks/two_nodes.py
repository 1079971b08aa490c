"""Two (and three) launchers on one host, one rank each: a rank dies, a node dies, a node waits."""

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.jobs import SCRIPTS, Job, Launcher
from benchmarks.table import Row, Sample

START_S = 120.0
SETTLE_S = (1.0, 3.0)
ANY_TIME_S = (1.0, 10.0)
"""Before and after there is a standby."""
ALONE = Launcher(
    name="the script alone",
    prefix=(sys.executable,),
    env=(
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ),
)
"""What no launcher can beat."""
REPLACE_S = 90.0  # torchrun loses the job after 72 s
LEAVE_S = 30.0


def free_port() -> int:
    """Of this host, now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def options(nnodes: str, port: int, script: str) -> list[str]:
    """torchrun's, of every node, and the script."""
    return [
        f"--nnodes={nnodes}",
        "--precheck=off",  # which torchrun has none of
        "--nproc_per_node=1",
        "--max_restarts=100",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=127.0.0.1:{port}",
        "--rdzv_id=bench",
        "--local_addr=127.0.0.1",
        str(SCRIPTS / script),
    ]


def _listening(port: int) -> bool:
    """Whether a local socket listens on `port`; connecting would disturb it."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def start(job: Job, launcher: Launcher, nodes: int, args: list[str], port: int) -> str | None:
    """Start the nodes, node 0 first so that it holds the store; None, or why it did not work."""
    job.launch(launcher, args, 0)
    why = job.until(lambda: _listening(port), START_S)
    for node in range(1, nodes):
        job.launch(launcher, args, node)
    return why


def rank_fails(launcher: Launcher, rng: random.Random, sample: Sample, n: int) -> None:
    """A rank of node 1 is killed: until the first line of both new ranks."""
    port = free_port()
    with Job() as job:
        why = start(job, launcher, 2, options("2", port, "first_line.py"), port)
        why = why or job.until(lambda: job.first_each_rank("start", set(), 0) is not None, START_S)
        while why is None and sample.tries < n:
            time.sleep(rng.uniform(*SETTLE_S))
            before = job.pids()
            victim = next(e.pid for e in reversed(job.events()) if e.node == 1)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)

            def back(before: set[int] = before, killed: float = killed) -> bool:
                return job.first_each_rank("start", before, killed) is not None

            why = job.until(back, LEAVE_S)
            if why is None:
                new = job.first_each_rank("start", before, killed) or []
                sample.add(max(event.at for event in new) - killed)
        if why is not None:
            sample.fail(why)


def node_leaves(*, launcher_too: bool) -> "Scenario":
    """nnodes 1:2, node 1 is killed, whole or but for its launcher: until node 0 steps alone."""

    def scenario(launcher: Launcher, rng: random.Random, sample: Sample, n: int) -> None:
        del n
        port = free_port()
        with Job() as job:
            why = start(job, launcher, 2, options("1:2", port, "steps.py"), port)
            why = why or job.until(lambda: _stepped(job, 2, set()), START_S)
            if why is None:
                time.sleep(rng.uniform(*ANY_TIME_S))
                before, killed = job.pids(), time.monotonic()
                job.kill_processes(node=1, launcher_too=launcher_too)
                why = job.until(lambda: _alone(job, before, killed) is not None, LEAVE_S)
                at = _alone(job, before, killed)
                if at is not None:
                    sample.add(at - killed)
            if why is not None:
                sample.fail(why)

    return scenario


def _alone(job: Job, before: set[int], killed: float) -> float | None:
    """When a world of one finished its first step."""
    return next(
        (e.at for e in job.events()
         if e.kind == "step" and e.world == 1 and e.at > killed and e.pid not in before),
        None,
    )  # fmt: skip


def _stepped(job: Job, world: int, without: set[int]) -> bool:
    ranks = {e.rank for e in job.events()
             if e.kind == "step" and e.step >= 3 and e.world == world and e.pid not in without}  # fmt: skip
    return len(ranks) == world


def node_replaced(launcher: Launcher, rng: random.Random, sample: Sample, n: int) -> None:
    """nnodes 2 with a third waiting, node 1 is killed whole: until both new ranks finish a step."""
    del n
    port = free_port()
    with Job() as job:
        args = options("2", port, "steps.py")
        why = start(job, launcher, 2, args, port)
        why = why or job.until(lambda: _stepped(job, 2, set()), START_S)
        if why is None:
            job.launch(launcher, args, 2)
            time.sleep(8 + rng.uniform(*SETTLE_S))  # by then it waits
            before, killed = job.pids(), time.monotonic()
            job.kill_processes(node=1)

            def back() -> bool:
                return job.first_each_rank("step", before, killed) is not None

            why = job.until(back, REPLACE_S)
            new = job.first_each_rank("step", before, killed) or []
            if new:
                sample.add(max(event.at for event in new) - killed)
        if why is not None:
            sample.fail(why)


def one_of_two(kind: str) -> "Scenario":
    """nnodes 1:2 with one present: launch to its first event of that kind."""

    def scenario(launcher: Launcher, rng: random.Random, sample: Sample, n: int) -> None:
        del rng, n
        port = free_port()
        with Job() as job:
            args = options("1:2", port, "steps.py")
            job.launch(launcher, args[-1:] if launcher is ALONE else args)
            why = job.until(lambda: any(e.kind == kind for e in job.events()), START_S)
            if why is not None:
                sample.fail(why)
                return
            first = next(e.at for e in job.events() if e.kind == kind)
            sample.add(first - job.started[0])

    return scenario


Scenario = Callable[[Launcher, random.Random, Sample, int], None]
SCENARIOS: dict[str, tuple[Scenario, str, int]] = {
    "rank": (rank_fails, "2 nodes, a rank is killed, to all new ranks' first line", 20),
    "agent": (
        node_leaves(launcher_too=False),
        "nnodes 1:2, agent and ranks of a node are killed, to a step without it",
        20,
    ),
    "leave": (
        node_leaves(launcher_too=True),
        "the same, the launcher too, to a step without it",
        20,
    ),
    "replace": (node_replaced, "nnodes 2, a third waits, a node is killed, to a step with it", 20),
    "one": (one_of_two("start"), "nnodes 1:2 with one present, launch to its first line", 20),
    "one-step": (one_of_two("step"), "the same, to its first step", 20),
}


def rows(
    ours: Launcher | None, peers: Sequence[Launcher], names: Sequence[str], scale: float
) -> list[Row]:
    """One row a scenario; `scale` multiplies how often each is tried."""
    found = []
    for name in names or SCENARIOS:
        scenario, measure, usual = SCENARIOS[name]
        n = max(round(usual * scale), 1)
        samples = []
        floor = (ALONE,) if name.startswith("one") else ()
        for launcher in (*((ours,) if ours else ()), *peers, *floor):
            sample, rng = Sample(launcher=launcher.name), random.Random(0)
            while sample.tries < n:
                scenario(launcher, rng, sample, n)
            samples.append(sample)
        split = 1 if ours else 0
        found.append(Row(measure=measure, ours=samples[0] if ours else None, peers=samples[split:]))
    return found

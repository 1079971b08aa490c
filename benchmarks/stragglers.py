"""Ranks that are slow: `python -m benchmarks.stragglers [--clean N] [--cpu N] [--node N] [--link N]`, or, on this machine's GPUs,
`--device cuda [--clean N] [--gpu N] [--host N] [--ranks N]`.

Ranks that train by DDP over Gloo on two nodes of this machine; each run is a job of its own. clean: nothing is slow,
and there must be no verdict. cpu: one rank gets less of a core than it needs (a cgroup's quota), so that it computes
`--more` longer; node: all ranks of one node do. link: the nodes are network namespaces, and one's link is limited by `tc`. Seconds from the fault to
the verdict, and whether what was slow was named, and nothing else.

On GPUs it is one node and NCCL. gpu: another process keeps one rank's GPU busy for the part of the time that makes
passes `--more` longer, which is tried before; the rank has to be named, by its device's times, and the device. Where
ranks share a GPU, which slows all of them, over Gloo, the rank multiplies more instead, five times `--more`. host: the
rank's host sleeps for `--more` of a step before each; the rank has to be named, and its host. cost: what measuring
steps on a device adds to them, in pairs.
"""

import abc
import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.table import heading
from tests.e2e.harness import ROOT, Job, network
from tests.e2e.harness.throttle import throttled

SCRIPTS = ROOT / "tests" / "e2e" / "harness" / "scripts"
SCRIPT, GPU_SCRIPT = SCRIPTS / "stragglers.py", SCRIPTS / "slow_gpus.py"
COMPETING = ROOT / "benchmarks" / "scripts" / "competing.py"
COST = "benchmarks.scripts.device_cost"
INTERVALS = 12
"""Before a fault: more than a round is looked at without a verdict."""


@dataclass(frozen=True, kw_only=True)
class Work(abc.ABC):
    ranks: int
    products: int
    interval: float

    @abc.abstractmethod
    def begin(self, job: Job, net: network.Network | None = None) -> None:
        """Start its launchers."""

    @property
    def flags(self) -> tuple[str, str]:
        return ("--straggler-interval", str(self.interval))

    def until(self, job: Job, intervals: int, seen: Callable[[], bool]) -> None:
        """Wait for it, and two intervals more in which others might be named; for so many at most."""
        for _ in range(intervals):
            self.intervals(job, 1)
            if seen():
                self.intervals(job, 2)
                return

    def intervals(self, job: Job, count: int) -> None:
        """Wait for so many."""
        begun = job.wait_for_steps(self.ranks)
        first = job.told("step", round=begun, rank=0)[-1].at
        last = first + count * self.interval
        job.wait_for(
            f"{count} intervals",
            lambda: job.told("step", round=begun, rank=0)[-1].at > last or None,
        )


@dataclass(frozen=True, kw_only=True)
class CpuWork(Work):
    """Of ranks on two nodes."""

    sleep: float
    parameters: int

    def begin(self, job: Job, net: network.Network | None = None) -> None:
        numbers = (self.sleep, self.products, self.parameters)
        entry = (str(SCRIPT), str(job.folder), *map(str, numbers))
        for node in range(2):
            more = {}
            if net is not None:
                job.address = net.address(0)
                more = {"prefix": net.on(node), "environ": {"GLOO_SOCKET_IFNAME": "eth0"}}
            job.start(*self.flags, nodes="2", nproc=self.ranks // 2, entry=entry, **more)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class GpuWork(Work):
    """Of ranks on one node, one to a GPU where there are enough."""

    rows: int

    @property
    def shared(self) -> bool:
        return self.ranks > torch.cuda.device_count()

    def begin(self, job: Job, net: network.Network | None = None) -> None:
        entry = (str(GPU_SCRIPT), str(job.folder), str(self.rows), str(self.products))
        job.start(*self.flags, nproc=self.ranks, entry=entry)


def verdicts(job: Job) -> list[tuple[float, str]]:
    """When, in job time, and what."""
    found = (re.match(r" *([\d.]+) Straggling: (.*)", event) for event in job.events())
    return [(float(one[1]), one[2]) for one in found if one is not None]


def end(job: Job) -> None:
    job.finish()
    for node in job.nodes:
        node.exit_code()


@contextlib.contextmanager
def of(work: Work, net: network.Network | None = None) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="elastic-stragglers-") as folder:
        job = Job(Path(folder))
        try:
            work.begin(job, net)
            yield job
            end(job)
        finally:
            job.close()


def clean(work: Work, runs: int, intervals: int) -> None:
    wrong = 0
    for run in range(runs):
        with of(work) as job:
            work.intervals(job, intervals)
            found = verdicts(job)
        wrong += bool(found)
        print(f"clean {run + 1}: {found or 'no verdict'}", flush=True)
    print(f"clean: {wrong} of {runs} runs of {intervals} intervals have a verdict")


def step(job: Job) -> float:
    """Seconds of one, of the last fifty."""
    ends = [line.at for line in job.told("step", rank=0)[-51:]]
    return statistics.median(later - end for end, later in itertools.pairwise(ends))


def now(job: Job) -> float:
    """Job time, by the first step."""
    first = next(event for event in job.events() if "finished its first step" in event)
    return float(first.split()[0]) + time.monotonic() - job.told("step")[0].at


def faulty(kind: str, work: Work, runs: int, more: float, rate: str) -> None:
    right, took = 0, []
    for run in range(runs):
        victims = [run % work.ranks]
        if kind == "node":
            half = work.ranks // 2
            victims = [half * (run % 2) + number for number in range(half)]
        with contextlib.ExitStack() as stack:
            net = None
            if kind == "link":
                net = stack.enter_context(network.Network(f"elastic-slow-{run}", 2))
            job = stack.enter_context(of(work, net))
            work.intervals(job, INTERVALS)
            early, before = verdicts(job), step(job)
            began = now(job)
            if net is not None:
                net.limit(1, rate)
                wanted = r"transfers over the link between node0 and node1"
            else:
                shares = [share(job, victim, more) for victim in victims]
                for victim, less in zip(victims, shares, strict=True):
                    stack.enter_context(throttled([job.rank(1, victim)], less))
                wanted = rf"rank {victims[0]} on node\d computes"
                if kind == "node":
                    wanted = rf"all {len(victims)} ranks on node\d compute"
            work.intervals(job, 2 * INTERVALS)
            found, cost = verdicts(job)[len(early) :], step(job) / before - 1
        good = not early and bool(found) and all(re.search(wanted, text) for _, text in found)
        right += good
        took += [found[0][0] - began] if good else []
        print(
            f"{kind} {run + 1}, {victims if net is None else rate}, steps {cost:+.0%}: {early + found}",
            flush=True,
        )
    summary(f"{kind}: {right} of {runs} named and nothing else", took)


def summary(what: str, took: list[float]) -> None:
    median = f"{statistics.median(took):.1f} s, worst {max(took):.1f}" if took else "-"
    print(f"{what}, in {median}", flush=True)


class Competing:
    """A process that uses a GPU: competing.py."""

    def __init__(self, mode: str, device: int, work: GpuWork) -> None:
        command = (
            sys.executable,
            str(COMPETING),
            mode,
            str(device),
            str(work.rows),
            str(work.products),
        )
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line.strip()
        raise RuntimeError(f"{COMPETING.name} has ended with {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def busy_for(work: GpuWork, more: float) -> float:
    """The part of the time for which another process has to keep a GPU busy, so that passes take `more` longer."""
    with (
        contextlib.closing(Competing("steps", 0, work)) as steps,
        contextlib.closing(Competing("load", 0, work)) as load,
    ):
        steps.ask("")  # warm
        busy, cost = more, 0.0
        for _ in range(8):
            load.ask("0")
            before = float(steps.ask(""))
            load.ask(str(busy))
            now = float(steps.ask(""))
            cost = now / before - 1
            print(
                f"another process, busy for {busy:.1%} of the time: passes take {now:.2f} ms, else {before:.2f}: "
                f"{cost:+.1%}",
                flush=True,
            )
            if abs(cost - more) < 0.01:
                break
            busy *= min(2.0, max(0.5, more / max(cost, 0.01)))
        return busy


def faulty_on_gpus(kind: str, work: GpuWork, runs: int, more: float) -> None:
    """kind: gpu or host."""
    competes = kind == "gpu" and not work.shared
    busy = busy_for(work, more) if competes else 0.0
    right, took = 0, []
    for run in range(runs):
        victim = (run + 1) % work.ranks
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(of(work))
            load = None
            if competes:
                load = stack.enter_context(contextlib.closing(Competing("load", victim, work)))
            work.intervals(job, INTERVALS)
            early, before = verdicts(job), step(job)
            began, done = now(job), len(job.told("step", rank=0))
            if load is not None:
                load.ask(str(busy))
            elif kind == "host":
                write_fault(job, victim, sleep=more * before)
            else:
                write_fault(job, victim, products=max(1, round(5 * more * work.products)))
            part = "on the device" if kind == "gpu" else "the device waits for its host"
            wanted = rf"rank {victim} on node\d computes .*{part}"
            work.until(job, 2 * INTERVALS, lambda: len(verdicts(job)) > len(early))  # noqa: B023
            found, each = verdicts(job)[len(early) :], step(job)
            steps, cost = round((found[0][0] - began) / each) if found else 0, each / before - 1
        good = not early and bool(found) and all(re.search(wanted, text) for _, text in found)
        right += good
        took += [found[0][0] - began] if good else []
        print(
            f"{kind} {run + 1}, rank {victim}, step {done}: steps take {cost:+.1%} ({1000 * before:.1f} ms before); "
            f"named {steps} steps later: {early + found}",
            flush=True,
        )
    summary(f"{kind}: {right} of {runs} named, and what of it, and nothing else", took)


def write_fault(job: Job, rank: int, **fault: float) -> None:
    """Of slow_gpus.py."""
    path = job.folder / f"fault-{rank}"
    path.with_suffix(".new").write_text(json.dumps(fault))
    os.replace(path.with_suffix(".new"), path)


def share(job: Job, victim: int, more: float) -> float:
    """Of a core, with which the rank computes so much longer than it does."""
    pid = job.rank(1, victim)
    used, steps, at = _cpu(pid), len(job.told("step", round=1, rank=victim)), time.monotonic()
    job.wait_for_more_steps_of(1, victim, count=50)
    steps = len(job.told("step", round=1, rank=victim)) - steps
    cpu, step = (_cpu(pid) - used) / steps, (time.monotonic() - at) / steps
    return cpu / (cpu + more * step)


def _cpu(pid: int) -> float:
    """Seconds that its main thread has used."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clean", type=int, help="runs (10; on GPUs 2)")
    parser.add_argument("--cpu", type=int, default=5, help="runs (%(default)d)")
    parser.add_argument("--node", type=int, default=2, help="runs (%(default)d)")
    parser.add_argument("--link", type=int, default=3, help="runs (%(default)d)")
    parser.add_argument("--gpu", type=int, default=2, help="runs (%(default)d)")
    parser.add_argument("--host", type=int, default=1, help="runs (%(default)d)")
    parser.add_argument("--cost", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--more", type=float, help="a part (0.3; on GPUs 0.1)")
    parser.add_argument("--rate", default="20mbit", help="of the slow link (%(default)s)")
    parser.add_argument("--ranks", type=int, help="(4; on GPUs as many as there are)")
    parser.add_argument("--rows", type=int, default=8192, help="of a product on GPUs (%(default)d)")
    parser.add_argument("--sleep", type=float, default=0.2, help="seconds of a step (%(default)g)")
    parser.add_argument("--products", type=int, help="(100; on GPUs 20)")
    parser.add_argument("--parameters", type=int, default=25_600)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds (%(default)g)")
    parser.add_argument("--intervals", type=int, default=20, help="of a clean run")
    args = parser.parse_args()
    print(heading(), flush=True)
    if args.device == "cuda":
        return on_gpus(args)
    work = CpuWork(
        ranks=args.ranks or 4, sleep=args.sleep, products=args.products or 100, parameters=args.parameters,
        interval=args.interval,
    )  # fmt: skip
    if runs := 10 if args.clean is None else args.clean:
        clean(work, runs, args.intervals)
    if args.cpu:
        faulty("cpu", work, args.cpu, args.more or 0.3, args.rate)
    if args.node:
        faulty("node", work, args.node, args.more or 0.3, args.rate)
    if args.link:
        faulty("link", work, args.link, args.more or 0.3, args.rate)
    return 0


def on_gpus(args: argparse.Namespace) -> int:
    work = GpuWork(
        ranks=args.ranks or max(2, torch.cuda.device_count()), products=args.products or 20,
        interval=args.interval, rows=args.rows,
    )  # fmt: skip
    print(
        f"{work.ranks} ranks, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        flush=True,
    )
    if args.cost:
        subprocess.run([sys.executable, "-m", COST], check=True, cwd=ROOT)
    for kind, runs in (("gpu", args.gpu), ("host", args.host)):
        if runs:
            faulty_on_gpus(kind, work, runs, args.more or 0.1)
    if runs := 2 if args.clean is None else args.clean:
        clean(work, runs, args.intervals)
    return 0


if __name__ == "__main__":
    sys.exit(main())

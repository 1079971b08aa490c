"""Ranks that are slow: `python -m benchmarks.stragglers [--clean N] [--cpu N] [--link N]`.

Ranks that train by DDP over Gloo on two nodes of this machine; each run is a job of its own. clean: nothing is slow,
and there must be no verdict. cpu: one rank gets less of a core than it needs (a cgroup's quota), so that it computes
`--more` longer. link: the nodes are network namespaces, and one's link is limited by `tc`. Seconds from the fault to
the verdict, and whether what was slow was named, and nothing else.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness import ROOT, Job, network
from tests.e2e.harness.throttle import throttled

SCRIPT = ROOT / "tests" / "e2e" / "harness" / "scripts" / "stragglers.py"
INTERVALS = 12
"""Before a fault: more than a round is looked at without a verdict."""


@dataclass(frozen=True, kw_only=True)
class Work:
    ranks: int
    sleep: float
    products: int
    parameters: int
    interval: float

    def begin(self, job: Job, net: network.Network | None = None) -> None:
        entry = (
            str(SCRIPT),
            str(job.folder),
            str(self.sleep),
            str(self.products),
            str(self.parameters),
        )
        flags = ("--straggler-interval", str(self.interval))
        for node in range(2):
            more = {}
            if net is not None:
                job.address = net.address(0)
                more = {"prefix": net.on(node), "environ": {"GLOO_SOCKET_IFNAME": "eth0"}}
            job.start(*flags, nodes="2", nproc=self.ranks // 2, entry=entry, **more)  # type: ignore[arg-type]

    def intervals(self, job: Job, count: int) -> None:
        """Wait for so many."""
        begun = job.wait_for_steps(self.ranks)
        first = job.told("step", round=begun, rank=0)[-1].at
        last = first + count * self.interval
        job.wait_for(
            f"{count} intervals",
            lambda: job.told("step", round=begun, rank=0)[-1].at > last or None,
        )


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
        victim = run % work.ranks
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
                stack.enter_context(throttled([job.rank(1, victim)], share(job, victim, more)))
                wanted = rf"rank {victim} on node\d computes"
            work.intervals(job, 2 * INTERVALS)
            found, cost = verdicts(job)[len(early) :], step(job) / before - 1
        good = not early and bool(found) and all(re.search(wanted, text) for _, text in found)
        right += good
        took += [found[0][0] - began] if good else []
        print(
            f"{kind} {run + 1}, {victim if net is None else rate}, steps {cost:+.0%}: {early + found}",
            flush=True,
        )
    median = f"{statistics.median(took):.1f} s, worst {max(took):.1f}" if took else "-"
    print(f"{kind}: {right} of {runs} named and nothing else, in {median}")


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
    parser.add_argument("--clean", type=int, default=10, help="runs (%(default)d)")
    parser.add_argument("--cpu", type=int, default=5, help="runs (%(default)d)")
    parser.add_argument("--link", type=int, default=3, help="runs (%(default)d)")
    parser.add_argument("--more", type=float, default=0.3, help="a part (%(default)g)")
    parser.add_argument("--rate", default="20mbit", help="of the slow link (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sleep", type=float, default=0.2, help="seconds of a step (%(default)g)")
    parser.add_argument("--products", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=25_600)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds (%(default)g)")
    parser.add_argument("--intervals", type=int, default=20, help="of a clean run")
    args = parser.parse_args()
    work = Work(
        ranks=args.ranks, sleep=args.sleep, products=args.products, parameters=args.parameters,
        interval=args.interval,
    )  # fmt: skip
    if args.clean:
        clean(work, args.clean, args.intervals)
    if args.cpu:
        faulty("cpu", work, args.cpu, args.more, args.rate)
    if args.link:
        faulty("link", work, args.link, args.more, args.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())

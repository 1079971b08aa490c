"""Ranks that hang: `python -m benchmarks.hangs [named|jitter|reasons|cost|scale ...]`.

8 ranks over Gloo on two nodes of this machine, or over NCCL one for each of its GPUs (`--device cuda`; `--ranks` may share them),
steps of 20 ms unless said otherwise.

named: `--hangs` rounds, each of which hangs in another way and rank; seconds from the hang to the verdict, and to
the first step of the next round, and whether the right rank was named. jitter: steps that take ten times as long
now and then, asleep or computing; verdicts, of which there must be none, as `jitter --steps 10000 --seconds 0.1`
and `jitter --steps 1000 --seconds 1 --calm 100`. reasons: the same of `--reasons` runs in each of which something takes
long for a reason. cost: the time of a step of the same work in `--pairs` of blocks of one
run, as a machine may be faster now than a minute later: all processes but the ranks run in one, and are stopped in
the other, after which they catch up, which counts against them; the time of the ranks' cores that all these processes use, which is what
they cost where no core is left for them; and what a step without work (a backward pass, an
all-reduce, an optimizer's step) takes more in a rank than in a process of its own: hooks and torch's flight recorder.
scale: what a hang of `--nodes` of 8 ranks each takes of a master's core; no rank runs.
"""

import argparse
import asyncio
import bisect
import contextlib
import math
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.table import heading
from tests.e2e.harness import ROOT, Job, processes
from tests.e2e.harness.stuck import stuck_folder
from tests.master.thousands import Thousands

SCRIPT = ROOT / "tests" / "e2e" / "harness" / "scripts" / "hangs.py"
WAYS = {
    "cpu": ("stop", "loop", "gil", "sleep-with-gil", "skip", "mismatch", "worker", "dead", "read"),
    "cuda": ("stop", "loop", "gil", "kernel", "item", "worker", "dead", "skip", "mismatch", "read"),
}
"""Without a sleep that holds the GIL on machines with GPUs: where nobody may read stacks, the signal that asks for them wakes it."""
BLOCK = 1.0
"""Seconds; less than a step may be late for before anybody looks."""
BUSY, TIMES = 10.0, 12
"""Seconds for which the time that processes use is taken, and how often; their clocks are told by the hundredth."""
LONGEST = 0.1
"""Seconds of a step, of which a block is to have several."""
MOST_VERDICTS = 100
"""Rounds of a run that jitter."""
STEP = 60
"""In which they hang."""
TICKS = 10
"""Pairs of a rank and a process of its own."""
REASONS = ("late", "compiles", "alone", "saves")
"""What takes long and is no hang: a loader that comes back, and what one rank does while the others wait."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the ranks run."""

    device: str
    nodes: int
    ranks: int

    def begin(
        self, folder: Path, seconds: float, hangs: Sequence[str], *flags: str, **environ: str
    ) -> Job:
        job = Job(folder)
        entry = (str(SCRIPT), str(folder), str(STEP), str(seconds), self.device, *hangs)
        for _ in range(self.nodes):
            job.start(
                *flags, nodes=str(self.nodes), nproc=self.ranks // self.nodes, entry=entry, environ=environ
            )  # fmt: skip
        return job


def place(device: str, ranks: int | None) -> Place:
    if device == "cuda":
        return Place(device=device, nodes=1, ranks=ranks or torch.cuda.device_count())
    return Place(device=device, nodes=2, ranks=8)


def end(job: Job) -> None:
    job.finish()
    for node in job.nodes:
        node.exit_code()


def named(at: Place, folder: Path, count: int, seconds: float) -> None:
    """Jobs in which every round hangs in another way: at one place of the code a verdict makes the next one wait."""
    ways = tuple(way for way in WAYS[at.device] if way != "read" or Path("/dev/fuse").exists())
    if "read" not in ways:
        print("no /dev/fuse: no disk that never answers")
    rows: dict[str, list[tuple[bool, float, float]]] = {way: [] for way in ways}
    for first in range(0, count, len(ways)):
        own = folder / str(first)
        own.mkdir()
        numbers = range(first, min(count, first + len(ways)))
        hangs = [f"{ways[n % len(ways)]}:{(3 * n + 1) % at.ranks}" for n in numbers]
        with stuck_folder(own / "stuck") if "read" in ways else contextlib.nullcontext():
            # A dead worker's rank raises.
            job = at.begin(own, seconds, hangs, "--max-restarts", str(count))
            for number in range(len(hangs)):  # each within the harness's deadline
                job.wait_for_steps(at.ranks, after=number + 1, count=5)
            end(job)
        for number, (hang, row) in enumerate(zip(hangs, seen(job, hangs), strict=True), 2):
            rows[hang.partition(":")[0]].append(row)
            print(
                f"{hang}: verdict {row[1]:.2f} s, next step {row[2]:.2f} s, {started(job, number)}"
            )
    print(
        f"{'':16}{'right':>10}{'verdict s, p50':>16}{'worst':>8}{'next step s, p50':>18}{'worst':>8}"
    )
    for way, found in rows.items():
        if found:
            rights, quiets, afters = zip(*found, strict=True)
            print(
                f"{way:16}{sum(rights):>6}/{len(found):<3}{statistics.median(quiets):>16.2f}{max(quiets):>8.2f}"
                f"{statistics.median(afters):>18.2f}{max(afters):>8.2f}"
            )


def seen(job: Job, hangs: Sequence[str]) -> Iterator[tuple[bool, float, float]]:
    """Of each round: whether the right rank was named, after how long without a step (NaN: it ended by itself), and when
    all went on."""
    events = job.events()
    for number, hang in enumerate(hangs, 1):
        (told,) = (
            line for line in job.told("hang", round=number) if hang.endswith(f":{line.rank}")
        )
        said = next((e for e in events if f"round {number + 1}:" in e), "")
        quiet = re.search(r"no step for ([\d.]+) s", said)
        named = rf"rank {told.rank} on node\d (is|does|waits|raised) "
        right = re.search(named, said) is not None
        if not right:
            print(f"round {number}, {hang}: {said}")
        after = job.told("step", round=number + 1)[0].at - told.at
        yield right, float(quiet[1]) if quiet else float("nan"), after


def started(job: Job, number: int) -> str:
    """How the ranks of a round began, as each node says."""
    said = "\n".join(node.said() for node in job.nodes)
    return ", ".join(re.findall(rf"round {number}: (\d+ ranks started by .*)", said)) or "not told"


def ran(job: Job, steps: int) -> bool:
    """So many, in all rounds."""
    return len(job.told("step", rank=0)) >= steps


def reasons(at: Place, folder: Path, count: int, seconds: float) -> None:
    """A job for each, of one round where nothing is taken for a hang."""
    wrong = 0
    for number in range(count):
        own = folder / str(number)
        own.mkdir()
        what = f"{REASONS[number % len(REASONS)]}:{(3 * number + 1) % at.ranks}"
        job = at.begin(own, seconds, [what])
        ended = job.wait_for_steps(at.ranks, count=STEP + 20)
        end(job)
        doubts = sum("looking at all" in node.said() for node in job.nodes)
        verdicts = [event for event in job.events() if "Hung:" in event]
        wrong += bool(verdicts) or ended > 1
        print(
            f"{what}: {len(verdicts)} verdicts, {'doubted' if doubts else 'not doubted'}", *verdicts
        )
    print(f"{wrong} of {count} had a verdict")


def jitter(at: Place, folder: Path, steps: int, seconds: float, calm: int) -> None:
    """Every rank is ten times as slow in one step of a hundred, at random, after `calm` steps."""
    job = at.begin(folder, seconds, [f"jitter:{calm}"] * MOST_VERDICTS)
    for count in range(10, steps + 10, 10):  # a few within the harness's deadline
        job.wait_for(f"{count} steps", partial(ran, job, count))
    end(job)
    hung = [event for event in job.events() if "Hung:" in event]
    doubts = sum(
        "looking at all" in line for node in job.nodes for line in node.said().splitlines()
    )
    told = len(job.told("step", rank=0))
    print(f"{told} steps of {seconds:g} s, some 10 x: {len(hung)} verdicts, {doubts} doubts")
    for event in hung:
        print(event)


def cost(device: str, folder: Path, pairs: int, seconds: float) -> None:
    """One run of a rank a core, or a GPU, which do the same in each step."""
    ranks = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    at = Place(device=device, nodes=1, ranks=ranks)
    job = at.begin(folder, 0, [f"work:{products(seconds)}"])
    warm = "modules preloaded"  # the last thing that goes on beside training
    job.wait_for(warm, lambda: all(warm in node.said() for node in job.nodes) or None)
    job.wait_for_steps(ranks)
    parts = all_but(job, {line.pid for line in job.told("start")})
    blocks = [block(parts, bool(pair % 2)) + block(parts, not pair % 2) for pair in range(pairs)]
    uses = [busy(parts) / ranks for _ in range(TIMES)]
    end(job)
    ends = [line.at for line in job.told("step", round=1, rank=0)]
    ratios = []
    for pair, times in enumerate(blocks):
        first, second = (mean_step(ends, *times[k : k + 2]) for k in (0, 2))
        ratios.append((first / second if pair % 2 else second / first) - 1)
    took = statistics.median(after - before for before, after in pairwise(ends))
    sure = statistics.stdev(ratios) / math.sqrt(pairs) if pairs > 1 else math.nan
    print(
        f"{pairs} pairs of blocks, steps of {1000 * took:.1f} ms: all but the ranks costs {statistics.mean(ratios):+.2%} "
        f"+- {sure:.2%}, median {statistics.median(ratios):+.2%}"
    )
    used, uneven = statistics.mean(uses), statistics.stdev(uses) / math.sqrt(TIMES)
    print(
        f"all but the ranks use {used:.3%} +- {uneven:.3%} of the ranks' cores, over {TIMES} x {BUSY:.0f} s"
    )
    hooks = [tick() / took / 1e6 for _ in range(TICKS)]
    ours = statistics.mean(hooks)
    unsure = statistics.stdev(hooks) / math.sqrt(TICKS)
    print(
        f"a step's own work for it takes {ours * took * 1e6:.1f} +- {unsure * took * 1e6:.1f} us, {ours:.3%}"
    )
    by_clock = statistics.mean(ratios) + ours + 2 * math.hypot(sure, unsure)
    by_cores = used + ours + 2 * math.hypot(uneven, unsure)
    print(
        f"both together, with 95 % certainty: by the clock at most {by_clock:.2%}, by the cores' time {by_cores:.2%}"
    )


def all_but(job: Job, ranks: set[int]) -> list[int]:
    """Every process of the job that is neither of the ranks nor below one."""
    roots = [node.guardian for node in job.nodes]
    below = {p.pid for rank in ranks for p in processes.descendants(rank)} | ranks
    found = {p.pid for root in roots for p in processes.descendants(root)} | set(roots)
    return sorted(found - below)


def block(parts: Sequence[int], run: bool) -> tuple[float, float]:
    """Its begin and end; the parts run in it, or are stopped."""
    try:
        processes.kill(*parts, number=signal.SIGCONT if run else signal.SIGSTOP)
        began = time.monotonic()
        time.sleep(BLOCK)
        return began, time.monotonic()
    finally:
        processes.kill(*parts, number=signal.SIGCONT)


def busy(parts: Sequence[int]) -> float:
    """Cores that they use."""
    before, began = sum(map(processes.cpu_seconds, parts)), time.monotonic()
    time.sleep(BUSY)
    return (sum(map(processes.cpu_seconds, parts)) - before) / (time.monotonic() - began)


def mean_step(ends: Sequence[float], began: float, ended: float) -> float:
    """Seconds of a step that was whole in between."""
    first, last = bisect.bisect_left(ends, began), bisect.bisect_right(ends, ended) - 1
    return (ends[last] - ends[first]) / (last - first)


async def scale(nodes: int) -> None:
    """All nodes become quiet, two looks at them name who loops, and all go on."""
    job = Thousands(nodes, 8)
    looks = [job.looks(number, loops=777) for number in range(nodes)]
    beats("train", job, nodes, 0.0)
    beats("become quiet", job, nodes, 0.5)
    for number in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.process_time()
        *others, last = zip(looks, await job.orders(), strict=True)
        for node, answer in enumerate(others):
            job.answer(node, *answer)
        taken = time.process_time()
        job.shell.time += 1.0
        job.answer(nodes - 1, *last)
        judged = time.process_time()
        kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(
            f"look {number + 1} at {8 * nodes} ranks: taken in within {taken - began:.1f} s,"
            f" judged in {judged - taken:.2f}, {kept / 1024:.0f} MiB",
            flush=True,
        )
    print(f"named: {(await job.shell.hung.get()).ranks}")
    beats("go on", job, nodes, 0.0)


def beats(what: str, job: Thousands, nodes: int, quiet: float) -> None:
    began = time.process_time()
    for number in range(nodes):
        job.beat(number, quiet)
    spent = time.process_time() - began
    print(f"{nodes} nodes {what}: {spent:.2f} s, {spent / nodes * 1e6:.0f} us each", flush=True)


def tick() -> float:
    """Microseconds that a rank's main thread spends on being watched, of a step with one collective."""
    script = str(ROOT / "benchmarks" / "scripts" / "tick.py")
    launcher = ("-m", "elastic.run", "--standalone", "--nproc-per-node", "1")
    alone, ours = (
        float(
            subprocess.run(
                [sys.executable, *more, script], capture_output=True, text=True, check=True
            ).stdout
        )
        for more in ((), launcher)
    )
    return ours - alone


def products(seconds: float) -> int:
    """So many take a core about as long."""
    torch.set_num_threads(1)
    factor, least = torch.ones(256, 256), math.inf
    for _ in range(200):
        began = time.perf_counter()
        factor = (factor @ factor).softmax(0)
        least = min(least, time.perf_counter() - began)
    return max(20, round(seconds / least))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part",
        nargs="*",
        choices=("named", "jitter", "reasons", "cost", "scale", []),
        default=[],
    )
    parser.add_argument("--hangs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a step (%(default)g)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--calm", type=int, default=0, help="steps before any jitters (%(default)s)"
    )
    parser.add_argument("--reasons", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, help="on GPUs (as many)")
    args = parser.parse_args()
    parts = args.part or ("named", "jitter", "reasons", "cost", "scale")
    if "cost" in parts and args.seconds > LONGEST:
        parser.error(f"cost takes steps of at most {LONGEST:g} s")
    if args.ranks and args.device == "cpu":
        parser.error("--ranks is for GPUs; on CPUs there are 8")
    at = place(args.device, args.ranks)
    print(heading(), flush=True)
    for part in parts:
        with tempfile.TemporaryDirectory(prefix="elastic-hangs-") as folder:
            if part == "named":
                named(at, Path(folder), args.hangs, args.seconds)
            elif part == "jitter":
                jitter(at, Path(folder), args.steps, args.seconds, args.calm)
            elif part == "reasons":
                reasons(at, Path(folder), args.reasons, args.seconds)
            elif part == "scale":
                asyncio.run(scale(args.nodes))
            else:
                cost(args.device, Path(folder), args.pairs, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

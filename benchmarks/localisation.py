"""Faults found by paired tests, simulated: `python -m benchmarks.localisation [NODES ...] [--runs N]`.

Beside each share of faulty nodes, or of faulty links among those tested: which of the faults were named, which
were left undecided, how many were named wrongly, after how many rounds of tests, and how long the longest
`decide` took. Faults and noise are those of `tests/sim/probed.py`; each run has a seed of its own.
"""

import argparse
import sys
import time
from collections import Counter

from elastic.master.events import NodeId
from elastic.master.pair_results import Test
from elastic.master.pairing import Found, Plan, Solo, decide
from tests.sim.probed import World, spoiled

SIZES = (2, 3, 4, 8, 33, 64, 256, 1024, 4096)
SHARES = ((0.0, 0.0), (0.01, 0.0), (0.05, 0.0), (0.0, 0.01), (0.0, 0.05), (0.05, 0.05))
HEAD = "| nodes | faulty nodes | faulty links | runs | faults | named | undecided | missed | wrong | rounds | decide() |"


def probe(world: World) -> tuple[Plan, int, float]:
    """The last plan, after how many rounds, and the longest seconds of a decision."""
    solo = dict.fromkeys(world.labels, Solo(found=Found.FINE))
    rounds: list[tuple[Test, ...]] = []
    longest = 0.0
    while True:
        start = time.perf_counter()
        plan = decide(world.labels, solo, rounds)
        longest = max(longest, time.perf_counter() - start)
        if not plan.groups:
            return plan, len(rounds), longest
        rounds.append(world.run(plan.groups))


def row(count: int, nodes: float, links: float, runs: int) -> str:
    found: Counter[str] = Counter()
    most, longest = 0, 0.0
    for seed in range(runs):
        world = spoiled(count, nodes, links, seed, racks=count // 16 if seed % 2 else 0)
        plan, rounds, seconds = probe(world)
        most, longest = max(most, rounds), max(longest, seconds)
        missed, all_ = world.missed(plan.verdicts), world.missed(())
        said: set[tuple[NodeId, ...]] = {(n,) for one in plan.undecided for n in one.nodes}
        said |= {which for one in plan.undecided for which in one.links}
        found["faults"] += len(all_)
        found["undecided"] += len(missed & said)
        found["missed"] += len(missed - said)
        found["named"] += len(all_ - missed)
        found["wrong"] += len(world.wrong(plan.verdicts))
    figures = [found[what] for what in ("faults", "named", "undecided", "missed", "wrong")]
    cells = [
        f"{count:,}",
        f"{nodes:.0%}",
        f"{links:.0%}",
        f"{runs:,}",
        *map("{:,}".format, figures),
    ]
    return "| " + " | ".join([*cells, str(most), f"{longest * 1e3:.0f} ms"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.localisation", description=__doc__)
    parser.add_argument("nodes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--runs", type=int, help="of each size and share (by size)")
    args = parser.parse_args()
    print(HEAD)
    print("|" + "---|" * HEAD.count(" | ") + "---|")
    for count in args.nodes:
        runs = args.runs or max(20, min(1000, 32768 // count))
        for nodes, links in SHARES:
            print(row(count, nodes, links, runs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Print the table of timings: `python -m benchmarks [NAME ...]`."""

import argparse
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from benchmarks import (
    copying,
    flush,
    master,
    master_killed,
    node_lost,
    peers,
    preprocess,
    probes,
    restart,
    save_cost,
    saves,
    snapshots,
    start,
    two_nodes,
)
from benchmarks.jobs import Launcher
from benchmarks.table import Row, render, save

NAMES = {
    "start": "launch to a rank's first line: elastic-run, torchrun",
    "restart": "SIGKILL of a rank to the next step: elastic-run, torchrun, DLRover",
    "two_nodes": "a rank or a node dies, a node waits: elastic-run, torchrun",
    "master_killed": "SIGKILL of the master to the next one's word, ranks training on",
    "master": "one master, thousands of agents: join, replace, memory; bare grpc.aio",
    "copying": "CPU tensors into a slot with checksums, beside memcpy",
    "save_cost": "what a save takes to be planned, of many tensors, kept and anew",
    "flush": "a snapshot to a disk beside dd, and what others feel of it",
    "saves": "what a save to memory adds, of tensors on CPU or GPU: elastic, DLRover",
    "node_lost": "a node dies with its memory: steps computed twice, bytes read of storage, seconds",
    "probes": "a probe of this node: from nothing, with torch imported ahead; what it found",
    "preprocess": "text to Megatron's files: elasticctl data, Megatron's loop (only where named)",
    "snapshots": "what a save adds, shadow, stream and DCP; restore (needs a device; only where named)",
}
ON_DEMAND = {"preprocess", "snapshots"}
"""Only run where they are named."""


def main() -> int:
    """Run what was asked for; figures go to stdout as a table and to a file as JSON."""
    args = _parser().parse_args()
    ours = None if args.no_ours else peers.OURS
    if ours and args.ours:
        ours = replace(ours, prefix=tuple(shlex.split(args.ours)))
    wanted = args.peers.split(",") if args.peers else []
    found: list[Row] = []
    for name in args.name or [name for name in NAMES if name not in ON_DEMAND]:
        found += _rows(name, args, ours, wanted)
        save(found, args.out)
    sys.stdout.write(render(found))
    for row in found:
        for sample in (*((row.ours,) if row.ours else ()), *row.peers):
            for why, times in Counter(sample.notes).items():
                sys.stdout.write(f"{times} x {sample.launcher}, {row.measure}: {why}\n")
    return 0


def _rows(
    name: str, args: argparse.Namespace, ours: Launcher | None, wanted: list[str]
) -> list[Row]:
    torchrun = [peers.TORCHRUN] if "torchrun" in wanted else []
    if name == "start":
        return start.rows(ours, torchrun, args.n or 20)
    if name == "master_killed":
        return master_killed.rows(ours, args.n or 50) if ours else []
    if name == "master":
        return master.rows(args.agents or master.SIZES, args.n or 5, bare="bare" in wanted)
    if name == "copying":
        return copying.rows(args.copy_gib, args.n or 15)
    if name == "probes":
        return probes.rows(args.level, args.n or 5, args.folder)
    if name == "save_cost":
        return save_cost.rows(args.n or 25)
    if name == "flush":
        return flush.rows(args.flush_gib, args.n or 5, args.folder)
    if name == "saves":
        saved = saves.Setting(ranks=args.ranks, device=args.device, gib=args.copy_gib)
        return saves.rows(ours, _dlrover(args, wanted), saved)
    if name == "node_lost":
        return node_lost.rows(ours, args.node_gib, args.n or 3) if ours else []
    if name == "preprocess":
        given = tuple(args.vocabulary) if args.vocabulary else None
        python = args.megatron_python or Path(sys.executable)
        return preprocess.rows(python, args.text_mb, args.ranks, args.n or 5, given)
    if name == "snapshots":
        measured = snapshots.Setting(
            ranks=args.ranks, device=args.device, gib=args.gib, ways=args.way or snapshots.WAYS
        )
        return snapshots.rows(ours, measured) if ours else []
    if name == "two_nodes":
        own_store = [peers.TORCHRUN_OWN_STORE] if "torchrun-own-store" in wanted else []
        return two_nodes.rows(ours, [*torchrun, *own_store], args.scenario, args.scale)
    if "torchrun-own-store" in wanted:
        torchrun.append(peers.TORCHRUN_OWN_STORE)
    setting = restart.Setting(
        kills=args.n or 20,
        ranks=args.ranks,
        device=args.device,
        hold_gib=args.hold_gib,
        settle=tuple(args.settle),
    )
    return restart.rows(ours, [*torchrun, *_dlrover(args, wanted)], setting)


def _dlrover(args: argparse.Namespace, wanted: list[str]) -> list[Launcher]:
    if "dlrover" not in wanted:
        return []
    return [peers.dlrover(args.dlrover_python or peers.make_venv())]


def _name(argument: str) -> str:
    if argument not in NAMES:
        raise argparse.ArgumentTypeError(f"there is no {argument!r}")
    return argument


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="names:\n" + "\n".join(f"  {name:14} {line}" for name, line in NAMES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="*",
        type=_name,
        help="any of those listed below; all that need nothing special",
    )
    parser.add_argument("--ours", help="command prefix in place of `python -m elastic.run`")
    parser.add_argument("--no-ours", action="store_true", help="peers only")
    parser.add_argument(
        "--peers",
        default="torchrun,dlrover,bare",
        help="any of torchrun, torchrun-own-store, dlrover, bare (a master of grpc.aio alone), "
        "comma between; '' for none",
    )
    parser.add_argument("--dlrover-python", type=Path, help="interpreter of a venv with DLRover")
    parser.add_argument(
        "--n",
        type=int,
        help="restart: kills (20); start: launches (20); master: runs (5); master_killed: kills (50); "
        "copying: copies (15); save_cost: saves (25); flush: flushes (5); preprocess, probes: (5); node_lost: losses (3)",
    )
    parser.add_argument("--ranks", type=int, default=2, help="restart, saves, snapshots: ranks")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="restart, saves, snapshots: device"
    )
    parser.add_argument(
        "--hold-gib", type=float, default=0.0, help="restart: device memory that each rank holds"
    )
    parser.add_argument(
        "--gib", type=float, default=11.5e9 / (1 << 30), help="snapshots: state of each rank"
    )
    parser.add_argument(
        "--way", action="append", choices=(*snapshots.WAYS, "none"),
        help="snapshots: only this one (repeatable); none: only loads",
    )  # fmt: skip
    parser.add_argument(
        "--settle", type=float, nargs=2, default=(1.0, 4.0), help="restart: seconds before a kill"
    )
    parser.add_argument(
        "--scenario", action="append", choices=two_nodes.SCENARIOS, default=[],
        help="two_nodes: only this one (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--agents", type=int, action="append", help="master: this many agents (repeatable)"
    )
    parser.add_argument(
        "--copy-gib", type=float, default=1.0, help="copying, saves: size of the tensors"
    )
    parser.add_argument(
        "--node-gib", type=float, default=1e9 / (1 << 30), help="node_lost: state of each node"
    )
    parser.add_argument("--flush-gib", type=float, default=2.0, help="flush: size of a snapshot")
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp"), help="flush, probes: on which disk"
    )
    parser.add_argument(
        "--megatron-python", type=Path, help="preprocess: interpreter with megatron-core (this one)"
    )
    parser.add_argument(
        "--text-mb", type=float, default=32.0, help="preprocess: text, by --ranks processes"
    )
    parser.add_argument(
        "--vocabulary", type=Path, nargs=2, metavar=("VOCAB", "MERGES"),
        help="preprocess: GPT-2's files (one of its size, trained on the text)",
    )  # fmt: skip
    parser.add_argument(
        "--level", choices=("quick", "full"), default="quick", help="probes: seconds, or minutes"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="two_nodes: times as many tries")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks.json"), help="the JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())

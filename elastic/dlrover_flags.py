"""dlrover-run's flags: each is honoured, said to have no effect, or refused with what to use.

None is dropped in silence, so a dlrover-run command line either means here what it meant there or
stops with a sentence. `--node_unit` is one of ours (`elastic/flags.py`).
"""

import argparse
from collections.abc import Mapping

from elastic.parser import Flag
from elastic.proto.errors import UsageError

NVIDIA = "nvidia.com/gpu"

FLAGS = (
    Flag(name="network-check", switch=True, help="As --precheck quick."),
    Flag(
        name="comm-perf-test",
        switch=True,
        help="Accepted, and of no effect: --precheck tests nodes two by two, and the report has what it found.",
    ),
    Flag(
        name="exclude-straggler",
        switch=True,
        help="Keep out what --precheck finds slow beside other nodes, too, and drain a node that computes longer than its "
        "peers while training, where that pays: a spare takes its place, or the others get more done without it.",
    ),
    Flag(
        name="save-at-breakpoint",
        switch=True,
        help="Accepted, and of no effect: the newest step is always in memory, and on storage at a job's end.",
    ),
    Flag(
        name="auto-config",
        switch=True,
        help="--nnodes from NODE_NUM and --nproc-per-node auto, where they are not given.",
    ),
    Flag(name="numa-affinity", switch=True, help="As --numa-binding node."),
    Flag(name="accelerator", default=NVIDIA, metavar="NAME", help=f"Only {NVIDIA}."),
    Flag(name="auto-tunning", switch=True, help="Refused."),
    Flag(name="training-port", metavar="PORT", help="Refused: use --port-range."),
    Flag(name="membind-policy", metavar="POLICY", help="Refused: use --numa-binding."),
    Flag(name="ucp-device-type", metavar="DEVICE", help="Refused: checkpoints fit any world."),
)

_PRECHECKS = {"0": "off", "1": "quick", "2": "full"}

_NO_EFFECT = (
    "comm_perf_test",
    "save_at_breakpoint",
)

_REFUSED = {
    "auto_tunning": "there is no tuner; leave it out and set batch size and workers in the script",
    "training_port": "it is a port for Ascend devices; use --port-range LO-HI for our listeners",
    "membind_policy": "use --numa-binding node for CPUs, and start the script under numactl "
    "--membind with --no-python for memory",
    "ucp_device_type": "checkpoints load into any world without a conversion; leave it out",
}


def apply(args: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Carry the flags over to torchrun's in `args`; the flags that have no effect.

    Raises UsageError for what is refused.
    """
    for dest, reason in _REFUSED.items():
        if dest in args.given and getattr(args, dest):
            raise UsageError(f"{_flag(dest)} (of dlrover-run) is not supported: {reason}")
    if args.accelerator != NVIDIA:
        raise UsageError(
            f"--accelerator {args.accelerator} is not supported: leave it out, and name the device "
            "in --nproc-per-node (xpu, or what its PyTorch extension is called)"
        )
    if "precheck" not in args.given:
        usual = "quick" if args.network_check else ""
        args.precheck = environ.get("PET_PRECHECK") or usual
    args.precheck = _PRECHECKS.get(args.precheck, args.precheck)
    if args.numa_affinity and args.numa_binding is None:
        args.numa_binding = "node"
    if args.auto_config:
        _auto_config(args, environ)
    return [_flag(dest) for dest in _NO_EFFECT if getattr(args, dest)]


def _auto_config(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    if "nproc_per_node" not in args.given:
        args.nproc_per_node = "auto"
    if "nnodes" not in args.given and environ.get("NODE_NUM"):
        args.nnodes = environ["NODE_NUM"]
        args.given.add("nnodes")


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")

"""torchrun's rendezvous flags, and Slurm's variables, to one thing: where the job's master is.

Every backend of torchrun's is the same master here. What still differs is how a node learns the
address, and how it knows whether it is the one to host the master.
"""

import argparse
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from elastic import slurm, values
from elastic.proto.env import Pod
from elastic.proto.errors import UsageError

Backend = Literal["static", "c10d"]

_C10D_PORT = 29400
_STATIC_PORT = 29500
_LOOPBACK = "127.0.0.1"
_OF_THE_SPEC = (
    "node_unit", "precheck", "exclude_straggler", "hang_action", "notify", "drain_timeout", "last_call",
    "fault_budget",
)  # fmt: skip
"""Flags for which an ElasticJob has fields."""
_HONOURED = ("join_timeout", "last_call_timeout", "lastcall_timeout", "is_host")  # --rdzv-conf


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the nodes of a job meet."""

    backend: Backend
    """The backend that the command line means, after --standalone and its like."""
    host: str
    """Name or address of the master's host, without brackets."""
    port: int
    """Port of the master; 0 is any free one, for a job of one node."""
    run_id: str
    """Id of the job."""
    node_rank: int | None = None
    """Place that the node asks for, where anybody named one."""
    hosts_master: bool | None
    """True: this node hosts the master; False: it joins one; None: it hosts if it has the address."""
    without_effect: tuple[str, ...] = ()
    """Flags that were given and are not looked at."""


def meeting(args: argparse.Namespace, conf: Mapping[str, str], step: slurm.Step | None) -> Meeting:
    """Where this node meets the others; `step` where Slurm is to say it, and not the flags.

    Raises UsageError where the flags make no sense.
    """
    min_nodes, max_nodes = values.node_counts(args.nnodes)
    if args.standalone:
        if min_nodes > 1:
            raise UsageError(
                f"--standalone runs on one node, and --nnodes {args.nnodes} needs more"
            )
        return _alone(args, "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port")
    if args.rdzv_backend not in get_args(Backend):
        raise UsageError(f"--rdzv-backend {args.rdzv_backend}: {_instead_of(args.rdzv_backend)}")
    if not args.rdzv_id:
        raise UsageError("--rdzv-id is empty: give the job a name, or leave the flag out")
    if args.master_port is not None and not 0 <= args.master_port <= 65535:
        raise UsageError(f"--master-port {args.master_port}: write a port from 0 to 65535")
    if step is not None:
        found = _of_step(args, conf, step)
    elif args.rdzv_backend == "c10d":
        found = _c10d(args, conf, max_nodes)
    elif not args.rdzv_endpoint and args.master_port is None and max_nodes == 1:
        return _alone(args)
    else:
        found = _static(args, max_nodes)
    if found.port == 0 and min_nodes > 1:
        raise UsageError("port 0 is a free port that no other node can know: give the port")
    return found


def join_pod(args: argparse.Namespace, inside: Pod) -> str:
    """In a pod of an ElasticJob its spec decides how many nodes there are; returns what that overrules."""
    asked = f"--nnodes {args.nnodes}" if "nnodes" in args.given else ""
    if args.standalone:
        asked, args.standalone = "--standalone", False
    args.nnodes = inside.nodes
    if not asked:
        return ""
    return (
        f"in a pod of ElasticJob {inside.job} its spec's range, {inside.nodes} nodes, decides; "
        f"{asked} does not"
    )


def of_pod(args: argparse.Namespace, inside: Pod) -> Meeting:
    """Where a worker pod meets the others: its master is a pod of its own."""
    host, port = values.endpoint(inside.master, _STATIC_PORT)
    asked = "node_rank" in args.given and args.node_rank >= 0
    return Meeting(
        backend="c10d",
        host=host,
        port=port,
        run_id=inside.job,
        node_rank=args.node_rank if asked else None,
        hosts_master=False,
        without_effect=tuple(
            f"--{name.replace('_', '-')}" for name in _OF_THE_SPEC if name in args.given
        ),
    )


def ignored_conf(conf: Mapping[str, str], backend: Backend) -> list[str]:
    """Keys of `--rdzv-conf` that change nothing, as a user would write them."""
    honoured = _HONOURED if backend == "c10d" else _HONOURED[:-1]
    return [f"--rdzv-conf {key}" for key in conf if key not in honoured]


def _instead_of(backend: str) -> str:
    if backend in ("etcd", "etcd-v2"):
        return "use --rdzv-backend c10d: the master takes etcd's part"
    return (
        "there is no such backend; use static or c10d (the master takes etcd's and etcd-v2's part)"
    )


def _alone(args: argparse.Namespace, *overridden: str) -> Meeting:
    """One node: nobody else has to find the master."""
    return Meeting(
        backend="c10d",
        host=_LOOPBACK,
        port=0,
        run_id=str(uuid.uuid4()),
        hosts_master=True,
        without_effect=_given(args, "rdzv_id", *overridden),
    )


def _of_step(args: argparse.Namespace, conf: Mapping[str, str], step: slurm.Step) -> Meeting:
    one = step.nodes == 1  # several such steps may share a node, so it takes any free port
    port = (
        (0 if one else step.port(args.port_range)) if args.master_port is None else args.master_port
    )
    node_rank = args.node_rank if "node_rank" in args.given else step.node_rank
    _check_place(node_rank, step.nodes)
    is_host = values.conf_bool(conf, "is_host") if args.rdzv_backend == "c10d" else None
    return Meeting(
        backend=args.rdzv_backend,
        host=_LOOPBACK if one else step.first_host,
        port=port,
        run_id=args.rdzv_id if "rdzv_id" in args.given else step.run_id,
        node_rank=node_rank,
        hosts_master=step.node_rank == 0 if is_host is None else is_host,
    )


def _c10d(args: argparse.Namespace, conf: Mapping[str, str], max_nodes: int) -> Meeting:
    host, port = values.endpoint(args.rdzv_endpoint or "localhost", _C10D_PORT)
    # torchrun ignores the place that a node asks for here; we honour it where it can be had.
    asked = "node_rank" in args.given
    usable = asked and 0 <= args.node_rank < max_nodes
    return Meeting(
        backend="c10d",
        host=host,
        port=port,
        run_id=args.rdzv_id,
        node_rank=args.node_rank if usable else None,
        hosts_master=values.conf_bool(conf, "is_host"),
        without_effect=_given(args, "master_addr", "master_port", *["node_rank"] * (not usable)),
    )


def _static(args: argparse.Namespace, max_nodes: int) -> Meeting:
    _check_place(args.node_rank, max_nodes)
    port = _STATIC_PORT if args.master_port is None else args.master_port
    host, port = values.endpoint(args.rdzv_endpoint or f"{args.master_addr}:{port}", port)
    return Meeting(
        backend="static",
        host=host,
        port=port,
        run_id=args.rdzv_id,
        node_rank=args.node_rank,
        hosts_master=args.node_rank == 0,
        without_effect=_given(args, "master_addr") if args.rdzv_endpoint else (),
    )


def _check_place(node_rank: int, nodes: int) -> None:
    if not 0 <= node_rank < nodes:
        raise UsageError(
            f"--node-rank {node_rank}: with {nodes} nodes it goes from 0 to {nodes - 1}"
        )


def _given(args: argparse.Namespace, *dests: str) -> tuple[str, ...]:
    return tuple("--" + dest.replace("_", "-") for dest in dests if dest in args.given)

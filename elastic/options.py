"""`elastic-run`'s command line and environment, as one frozen `Options`.

Every setting is read here and nowhere else. Imports little, so that `--help` and a mistake answer
at once; what needs a look at the machine (how many GPUs, whose address) is left to the launcher.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic import dlrover_flags, slurm, values
from elastic.endpoint import Backend, ignored_conf, join_pod, meeting, of_pod
from elastic.flags import EXIT_CODES, OURS, TORCHRUN, USE_ENV
from elastic.master.policy import HANG_ACTIONS, PRECHECKS
from elastic.parser import HelpFormatter, Parser
from elastic.proto.env import Pod, pod
from elastic.proto.errors import UsageError

EntryKind = Literal["script", "module", "program", "run_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that a command line of `elastic-run` says; times are in seconds."""

    # Size.
    min_nodes: int
    """Fewest nodes to train on."""
    max_nodes: int
    """Most nodes to train on; more wait as hot spares."""
    nproc_per_node: str
    """Ranks a node: digits, or `gpu`, `cpu`, `auto` and the like (`agent/slots.py` counts them)."""
    node_unit: int
    """Nodes of a round are a multiple of it."""
    rank_unit: int
    """World size is a multiple of it."""

    # Where the nodes meet.
    rdzv_backend: Backend
    """torchrun's backend, after --standalone; etcd's are refused."""
    endpoint_host: str
    """Name or address of the master's host, without brackets."""
    endpoint_port: int
    """Port of the master; 0 is any free one, for a job of one node."""
    run_id: str
    """Id of the job (TORCHELASTIC_RUN_ID); a uuid for a standalone job, `none` if nobody gave one."""
    hosts_master: bool | None
    """True: this node hosts the master; False: it joins one; None: it hosts if it has the address."""
    node_rank: int | None
    """Place that this node asks for, if any."""
    node_id: str | None
    """Lasting name of this node, or None to make one up."""
    labels: Mapping[str, str]
    """Topology labels of this node."""
    local_addr: str | None
    """Address at which others reach this node, or None to find it."""
    port_range: tuple[int, int] | None
    """Ports for listeners, both included; None is any free port."""
    join_timeout: float
    """Time for the first round to come together, more than 0."""
    last_call: float
    """Wait for nodes that are on their way, once there are enough."""
    preparation: float
    """Time for a node that joins to import what its ranks will, before the others stop for it."""
    lease: float
    """Silence after which a node is probed, more than 0."""
    below_min_timeout: float | None
    """Time with fewer nodes than `min_nodes` after which the job fails; None is never."""

    # What runs.
    entry_kind: EntryKind
    """How `entry` is run: `python -u F`, `python -u -m M`, as a program, or by runpy.run_path."""
    entry: str
    """Script, module or program."""
    entry_args: tuple[str, ...]
    """Its arguments."""
    python: str
    """The Python that runs scripts and modules (PYTHON_EXEC, else the one that runs us)."""
    role: str
    """Role of the ranks."""
    rank_start: Literal["auto", "fork", "spawn"]
    """Whether ranks are forked from a standby: once there is one, from the first, never."""
    spare_ranks: Literal["auto", "off"]
    """Whether ranks may be started ahead."""
    virtual_local_rank: bool
    """LOCAL_RANK is 0 for all, and each rank sees its own device alone."""
    numa_binding: str | None
    """torchrun's affinity mode, or None."""

    # Failures, and the end.
    max_restarts: int
    """Restarts after failures of the script itself."""
    fault_budget: int
    """Recoveries from other faults before the job fails."""
    precheck: str
    """How nodes are probed before they train: off, quick or full."""
    probe_only: bool
    """Nothing is run then."""
    exclude_straggler: bool
    """Those that are slow are kept out, or drained where that pays."""
    hang_action: str
    """What happens to a round that hangs: recover, dump or ignore."""
    hang_floor: float
    """Seconds without a step below which no round counts as hung."""
    notify: tuple[str, ...]
    """Who is told of what goes wrong, and of the end: http(s) URLs and shell commands."""
    straggler_interval: float
    """Seconds of whose steps ranks' times are compared."""
    failure_grace: float
    """From SIGTERM to SIGKILL for survivors of a failed round."""
    shutdown_timeout: float
    """From a signal to elastic-run until SIGKILL for its ranks."""
    drain_timeout: float
    """Time for a drained node to save and leave."""
    signals_to_handle: tuple[str, ...]
    """Signals passed on to the ranks, which end the job."""
    drain_signals: tuple[str, ...]
    """Signals that drain this node: under srun, and in a pod of an ElasticJob."""
    exit_codes: str
    """Whose exit codes: torchrun's, or detailed ones."""
    termination_log: str
    """File for the cause of the launcher's end, if it exists."""

    # Logs and files.
    log_dir: str | None
    """Folder for logs; None is a temporary one, /dev/null none."""
    log_keep: int
    """Attempts whose log folders are kept."""
    log_limit: int
    """Most bytes of one log file; 0 is no limit."""
    redirects: values.Std
    """Streams that go to files: 1 stdout, 2 stderr, 3 both; by local rank where it is a mapping."""
    tee: values.Std
    """The same streams to the console as well."""
    local_ranks_filter: frozenset[int] | None
    """Local ranks that the console shows; None is all."""
    duplicate_stdout_filters: tuple[str, ...]
    """Words whose stdout lines are copied to a file of their own."""
    duplicate_stderr_filters: tuple[str, ...]
    """Words whose stderr lines are copied to a file of their own."""
    log_line_prefix_template: str | None
    """Prefix of teed lines, with ${role_name}, ${rank} and ${local_rank}."""
    report: str | None
    """File for the report of the job's end."""
    state_dir: str | None
    """Folder of the journal and what else outlives a process."""

    # Safety.
    token_file: str | None
    """File with the job's token."""
    require_token: bool
    """Refuse whoever shows no token."""
    tls_cert: str | None
    """Certificate file; all three of them or none."""
    tls_key: str | None
    """Key file."""
    tls_ca: str | None
    """Authority's file."""

    # About the command line itself.
    pod: Pod | None
    """The pod of an ElasticJob that this is in."""
    overruled: str
    """What the pod's job decides otherwise, in a sentence; or empty."""
    without_effect: tuple[str, ...]
    """What was given and changes nothing, as a user would write it."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not value >= least:  # so put, it catches NaN
                raise UsageError(f"{_flag(name)} {value}: it must be at least {least}")
        for name in ("join_timeout", "lease"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{_flag(name)} must be more than 0 seconds")
        if self.max_nodes // self.node_unit * self.node_unit < self.min_nodes:
            raise UsageError(
                f"--node-unit {self.node_unit}: no multiple of it lies in --nnodes "
                f"{self.min_nodes}:{self.max_nodes}"
            )
        if self.probe_only and self.precheck == "off":
            raise UsageError("--probe-only wants --precheck quick or full")
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{_flag(name)} {getattr(self, name)}: write {' or '.join(allowed)}"
                )
        if len({self.tls_cert is None, self.tls_key is None, self.tls_ca is None}) > 1:
            raise UsageError("--tls-cert, --tls-key and --tls-ca go together: give all or none")


_WORDS: Mapping[str, tuple[str, ...]] = {
    "rank_start": ("auto", "fork", "spawn"),
    "spare_ranks": ("auto", "off"),
    "precheck": PRECHECKS,
    "hang_action": HANG_ACTIONS,
    "exit_codes": EXIT_CODES,
}
"""What a flag may say; argparse does not look at what the environment says."""

_LEAST: Mapping[str, float] = {
    "min_nodes": 1,
    "node_unit": 1,
    "rank_unit": 1,
    "max_restarts": 0,
    "fault_budget": 0,
    "hang_floor": 0.1,  # as often as agents look
    "straggler_interval": 0.5,
    "failure_grace": 0,
    "shutdown_timeout": 0,
    "drain_timeout": 0,
    "last_call": 0,
    "preparation": 0,
    "log_keep": 1,
    "log_limit": 0,
}

_NOTHING_TO_SAY: Mapping[str, object] = {
    "monitor_interval": 0.1,
    "start_method": "spawn",
    "event_log_handler": "null",
}
"""torchrun's flags for what we have no use of, with their defaults: nothing is polled here, ranks are
started in a way of our own, and events are in the journal."""

_AS_PARSED = (
    "node_unit",
    "rank_unit",
    "local_addr",
    "port_range",
    "preparation",
    "lease",
    "below_min_timeout",
    "role",
    "rank_start",
    "spare_ranks",
    "virtual_local_rank",
    "numa_binding",
    "max_restarts",
    "fault_budget",
    "probe_only",
    "exclude_straggler",
    "hang_action",
    "hang_floor",
    "straggler_interval",
    "failure_grace",
    "drain_timeout",
    "log_dir",
    "log_keep",
    "log_limit",
    "report",
    "termination_log",
    "state_dir",
    "token_file",
    "require_token",
    "tls_cert",
    "tls_key",
    "tls_ca",
)


def parse(argv: Sequence[str], environ: Mapping[str, str], *, local_rank: bool = False) -> Options:
    """The options of `argv` (without the program's name), with defaults from `environ`.

    local_rank: as `python -m torch.distributed.launch`, which tells a script its local rank by an
    argument, unless it gets --use-env.
    As torchrun, prints usage and one line, and raises SystemExit(2), where they make no sense.
    """
    parser = make_parser(environ, local_rank=local_rank)
    args = parser.parse(argv)
    try:
        if local_rank and not args.use_env:
            _add_local_rank(args)
        return _options(args, environ)
    except UsageError as error:
        parser.error(str(error))


def make_parser(environ: Mapping[str, str], *, local_rank: bool = False) -> Parser:
    """The parser of `elastic-run`, or of `elastic.launch`, with defaults from `environ`."""
    parser = Parser(
        prog="python -m elastic.launch" if local_rank else "elastic-run",
        usage="%(prog)s [flags] script.py [arguments of the script]\n"
        "       %(prog)s [flags] -m module [arguments]\n"
        "       %(prog)s [flags] --no-python program [arguments]",
        description="Run a PyTorch script on one or many nodes and keep it running. Takes "
        "torchrun's command line. A flag may be written with dashes or with underscores.",
        epilog="Exit codes: 0 the job finished; 1 it failed, or was ended; 2 usage; 213 it was "
        "drained, and the same command goes on; 128 + signal before the first round; "
        "more with --exit-codes detailed.",
        formatter_class=HelpFormatter,
    )
    parser.add_flags(
        "torchrun's flags",
        TORCHRUN,
        environ,
        "PET_",
        description="PET_<NAME> in the environment gives a default (not for --logs-specs and "
        "--numa-binding). They may be abbreviated.",
        abbreviate=True,
    )
    if local_rank:
        parser.add_flags(
            "torch.distributed.launch's flag",
            (USE_ENV,),
            environ,
            "PET_",
            description="It has no variable.",
            abbreviate=True,
        )
    parser.add_flags(
        "Elastic's flags",
        OURS,
        environ,
        "ELASTIC_",
        description="ELASTIC_<NAME> in the environment gives a default.",
        abbreviate=False,
    )
    parser.add_flags(
        "dlrover-run's flags",
        dlrover_flags.FLAGS,
        environ,
        "PET_",
        description="Taken so that its command lines run here, or say what to use instead.",
        abbreviate=False,
    )
    parser.add_argument(
        "training_script", help="The script, module or program that every rank runs."
    )
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its arguments.")
    return parser


def _options(args: argparse.Namespace, environ: Mapping[str, str]) -> Options:
    without_effect = dlrover_flags.apply(args, environ)
    if args.logs_specs is not None:
        raise UsageError(
            f"--logs-specs {args.logs_specs}: elastic-run writes its own logs; say where and what "
            "with --log-dir, --redirects and --tee"
        )
    for name, usual in _NOTHING_TO_SAY.items():
        if (value := getattr(args, name)) != usual:
            without_effect.append(f"{_flag(name)} {value}")
    in_step = slurm.started_by_srun(environ)
    step = slurm.step(environ) if in_step and not _says_where(args) else None
    if step is not None and "nnodes" not in args.given:
        args.nnodes = str(step.nodes)
    inside = pod(environ)
    overruled = "" if inside is None else join_pod(args, inside)
    min_nodes, max_nodes = values.node_counts(args.nnodes)
    if step is not None and min_nodes > step.nodes:
        raise UsageError(f"--nnodes {args.nnodes}: this step of Slurm's has {step.nodes} nodes")
    conf = values.rdzv_conf(args.rdzv_conf)
    where = meeting(args, conf, step) if inside is None else of_pod(args, inside)
    signals = values.signal_names(args.signals_to_handle)
    # One that the user asks to be passed on keeps that meaning under Slurm; Kubernetes has no other.
    drain = tuple(s for s in slurm.DRAIN_SIGNALS if in_step and s not in signals)
    if inside is not None:
        drain, signals = ("SIGTERM",), tuple(s for s in signals if s != "SIGTERM")
    return Options(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc_per_node=values.nproc(args.nproc_per_node),
        precheck=args.precheck or _precheck(args, max_nodes),
        rdzv_backend=where.backend,
        endpoint_host=where.host,
        endpoint_port=where.port,
        run_id=where.run_id,
        node_rank=where.node_rank,
        hosts_master=where.hosts_master,
        labels=_labels(args.label),
        notify=tuple(args.notify),
        join_timeout=values.conf_seconds(conf, "join_timeout", args.join_timeout),
        last_call=_last_call(conf, args.last_call),
        entry_kind=_entry_kind(args),
        entry=args.training_script,
        entry_args=tuple(args.training_script_args),
        python=environ.get("PYTHON_EXEC") or sys.executable,
        shutdown_timeout=_shutdown_timeout(args.shutdown_timeout, environ),
        signals_to_handle=signals,
        drain_signals=drain,
        exit_codes=args.exit_codes if inside is None else "detailed",
        node_id=args.node_id if inside is None else inside.name,
        pod=inside,
        overruled=overruled,
        redirects=values.std(args.redirects, "--redirects"),
        tee=values.std(args.tee, "--tee"),
        local_ranks_filter=values.local_ranks(args.local_ranks_filter),
        duplicate_stdout_filters=tuple(args.duplicate_stdout_filters),
        duplicate_stderr_filters=tuple(args.duplicate_stderr_filters),
        log_line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        without_effect=(*without_effect, *where.without_effect, *ignored_conf(conf, where.backend)),
        **{name: getattr(args, name) for name in _AS_PARSED},
    )


def _precheck(args: argparse.Namespace, most: int) -> str:
    """Where nobody has said how."""
    return "quick" if args.probe_only or (most > 1 and not args.standalone) else "off"


def _add_local_rank(args: argparse.Namespace) -> None:
    if args.no_python:
        raise UsageError("--no-python: a program gets no --local-rank, so give --use-env too")
    args.training_script_args.insert(0, "--local-rank=${local_rank}")


def _says_where(args: argparse.Namespace) -> bool:
    """Whether the user said where nodes meet, or that there is one, so that Slurm does not."""
    alone = "nnodes" in args.given and values.node_counts(args.nnodes)[1] == 1
    return bool(args.standalone or alone or args.given & {"rdzv_endpoint", "master_addr"})


def _entry_kind(args: argparse.Namespace) -> EntryKind:
    if args.run_path:
        return "run_path"
    if args.no_python and args.module:
        raise UsageError("--no-python and --module exclude each other: give one of them")
    return "program" if args.no_python else "module" if args.module else "script"


def _last_call(conf: Mapping[str, str], default: float) -> float:
    # DLRover writes the key without the first line between the words.
    default = values.conf_seconds(conf, "lastcall_timeout", default)
    return values.conf_seconds(conf, "last_call_timeout", default)


def _shutdown_timeout(flag: int | None, environ: Mapping[str, str]) -> float:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    try:
        timeout = float(text) if flag is None else float(flag)
    except ValueError:
        timeout = math.nan
    if not math.isfinite(timeout):
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text!r}: write a number of seconds")
    return timeout


def _labels(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in pairs:
        if found.setdefault(key, value) != value:
            raise UsageError(f"--label {key}: both {found[key]} and {value} were given; write one")
    return found


def _flag(name: str) -> str:
    return "--nnodes" if name == "min_nodes" else "--" + name.replace("_", "-")

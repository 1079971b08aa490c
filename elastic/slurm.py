"""What Slurm says about a job step: how many nodes, where the first is, which one this is.

`srun elastic-run train.py` is all a user has to write; every node works out the same endpoint from
the job's and the step's number, with no look at the network.
"""

import itertools
import logging
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.proto.errors import UsageError

log = logging.getLogger(__name__)

DRAIN_SIGNALS = ("SIGUSR1", "SIGUSR2")
"""Signals that `sbatch --signal` is asked for to warn of the end of a job's time."""

PORTS = (22000, 31999)
"""Ports for the master of a step, both included; below Linux's ephemeral ports (from 32768)."""

_HOST = r"(?:[\w.-]|\[[\d,-]+\])+"  # one item of a host list: text and brackets in turn
_STEP_STRIDE = 7919  # prime, so that steps of one job, and jobs one after another, are far apart
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0  # batch script, interactive shell, ...: numbers near 2**32


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that srun started, seen from one of its nodes."""

    run_id: str
    """`slurm-<job>`, with `.<step>` for any step but the first; the same after a requeue."""
    nodes: int
    """Nodes of the step."""
    node_rank: int
    """Place of this node in the step, from 0."""
    first_host: str
    """Name of node 0."""
    seed: int
    """Number that jobs and steps have for themselves, to choose a port by."""

    def port(self, ports: tuple[int, int] | None = None) -> int:
        """A port in `ports`, both ends included; the same on every node."""
        low, high = ports or PORTS
        return low + self.seed % (high - low + 1)


def started_by_srun(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of a step, not the batch script or a shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    return (
        bool(environ.get("SLURM_JOB_ID"))
        and "SLURM_PROCID" in environ
        and step.isdecimal()
        and int(step) < _FIRST_SPECIAL_STEP
    )


def step(environ: Mapping[str, str]) -> Step:
    """The step that `environ` describes; raises UsageError where it does not make sense."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks.isdecimal() and int(tasks) > nodes:
        raise UsageError(
            f"srun started {tasks} tasks on {nodes} nodes, and elastic-run starts the ranks of a "
            "node itself: add --ntasks-per-node=1 to srun and --nproc-per-node here"
        )
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    job, number = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
    names = expand(hosts)
    if not names:
        raise UsageError("SLURM_STEP_NODELIST is not set: give --nnodes and --rdzv-endpoint")
    return Step(
        run_id=f"slurm-{job}.{number}" if number else f"slurm-{job}",
        nodes=nodes,
        node_rank=_number(environ, "SLURM_NODEID"),
        first_host=names[0],
        seed=job + number * _STEP_STRIDE,
    )


def requeue(environ: Mapping[str, str]) -> None:
    """Put the job back into Slurm's queue, after its warning signal had it drained.

    The same job id goes on from its journal and checkpoints when it starts again.
    """
    job = environ.get("SLURM_JOB_ID", "")
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if not job.isdecimal() or scontrol is None:
        log.warning("drained; no scontrol here to requeue job %s with", job or "(none)")
        return
    command = [scontrol, "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        trouble = done.stderr.strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = str(error)
    if trouble:
        log.error("scontrol requeue %s: %s", job, trouble)


def expand(hostlist: str) -> list[str]:
    """Host names of Slurm's short form: `a[001-003,7],b1` has `a001`, `a002`, `a003`, `a7`, `b1`."""
    hosts: list[str] = []
    if hostlist and not re.fullmatch(f"{_HOST}(,{_HOST})*", hostlist):
        raise _unreadable(hostlist)
    for item in re.findall(_HOST, hostlist):
        parts = re.split(r"\[(.*?)\]", item)  # text, bracket, text, bracket, ..., text
        choices = [_ranges(p, hostlist) if i % 2 else [p] for i, p in enumerate(parts)]
        hosts += ("".join(name) for name in itertools.product(*choices))
    return hosts


def _ranges(text: str, hostlist: str) -> list[str]:
    """The numbers of one bracket, as wide as they are written: `08-10` is `08`, `09`, `10`."""
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if match is None:
            raise _unreadable(hostlist)
        first, last = match[1], match[2] or match[1]
        numbers += (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
    return numbers


def _unreadable(hostlist: str) -> UsageError:
    return UsageError(
        f"cannot read Slurm's list of hosts {hostlist!r}: give --nnodes and --rdzv-endpoint"
    )


def _number(environ: Mapping[str, str], *names: str) -> int:
    """The first of the variables that is set, as a number."""
    for name in names:
        if environ.get(name):
            if environ[name].isdecimal():
                return int(environ[name])
            raise UsageError(f"{name}={environ[name]!r} of Slurm is no number")
    raise UsageError(f"{names[0]} of Slurm is not set: give --nnodes and --rdzv-endpoint")

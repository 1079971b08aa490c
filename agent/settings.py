"""What one node's agent was asked to do; fixed for its life."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from elastic.proto.security import Security


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every rank runs."""

    kind: Literal["script", "module", "program", "run_path"]
    entry: str
    args: tuple[str, ...] = ()
    """`${local_rank}` in an argument is replaced by the local rank."""
    python: str
    """Interpreter of scripts and modules."""
    environ: Mapping[str, str]
    """The launcher's environment."""
    cwd: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    run_dir: Path | None
    """`<log-dir>/<run id>`; None: no logs and no error files (`--log-dir /dev/null`)."""
    redirects: int | Mapping[int, int] = 0
    """1 stdout, 2 stderr, 3 both go to files; by local rank where it is a mapping."""
    tee: int | Mapping[int, int] = 0
    """The same streams to the console as well."""
    local_ranks: frozenset[int] | None = None
    """Local ranks that the console shows; None: all."""
    stdout_filters: tuple[str, ...] = ()
    """Teed lines with one of these words go to `filtered_stdout.log` too."""
    stderr_filters: tuple[str, ...] = ()
    prefix: str | None = None
    """Template of the prefix of teed lines: ${role_name}, ${rank}, ${local_rank}."""
    keep: int = 100
    """Attempt folders kept."""
    limit: int = 1 << 30
    """Bytes of one log file on disk; older ones are given back. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    run_id: str
    node_id: str
    slots: int
    master: str
    """host:port."""
    host: str
    """Address at which other nodes reach this one; empty: none does."""
    workload: Workload
    logs: LogSettings
    security: Security
    several_nodes: bool = True
    """There may be others in the job."""
    role: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    node_rank: int | None = None
    max_restarts: int = 0
    """Only told to the ranks; the master counts."""
    ports: tuple[int, int] | None = None
    """Range for listeners, both ends included; None: any free port."""
    rank_start: Literal["auto", "fork", "spawn"] = "auto"
    """Whether ranks are forked from a standby: once there is one, from the first, never."""
    spare_ranks: bool = True
    """Ranks may be forked ahead of their round, on GPUs."""
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    """node, socket, exclusive or core-complex."""
    gpu_nodes: tuple[int, ...] = ()
    """NUMA node of each GPU, where `numa_binding` is given."""
    timer_pipe: str | None = None
    """Where ranks tell torch's countdown timers (agent/file_timer.py); None: nowhere."""
    open_files: int | None = None
    """Descriptors that a rank may have, as what started us; None: as many as the agent."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    drain_signals: tuple[str, ...] = ()
    detailed_codes: bool = False
    """The launcher's exit code says the cause (`proto/ending.py`)."""
    termination_log: Path = Path("/dev/termination-log")
    """Gets the cause, where the file exists."""
    shutdown_timeout: float = 30.0
    """Seconds that ranks get after a signal to the launcher, before SIGKILL."""
    join_timeout: float = 600.0
    """Seconds to wait for a master while nothing runs here."""
    kill_timeout: float = 10.0
    """Seconds after SIGKILL until a process counts as unkillable."""

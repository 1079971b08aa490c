"""`elastic-run`: takes torchrun's command line, and keeps the job running.

This process becomes the guardian (agent/guardian.py); here it only reads the command line, binds
the two sockets that must outlive everything else, and hands on. Exit codes: 0 the job finished, 1 it
failed or was ended, 2 usage, 213 drained; 128 + signal before the first round.
"""

import logging
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from elastic import checks, slurm
from elastic import options as cli
from elastic.addresses import look_up, own_address
from elastic.agent import cgroup, file_timer
from elastic.agent.guardian import Guardian
from elastic.agent.numa import gpu_nodes
from elastic.agent.pulse import Pulse
from elastic.agent.settings import AgentSettings, LogSettings, Workload
from elastic.agent.slots import resolve_slots
from elastic.agent.snapshots.vault import Vault
from elastic.console import ConsoleHandler
from elastic.listeners import Reservation, join, knock_socket, reserve
from elastic.master.state import DRAINED
from elastic.options import Options
from elastic.parser import Refused
from elastic.proto.ending import Ended, Ending, leave
from elastic.proto.env import configure_grpc
from elastic.proto.errors import ElasticError, UsageError
from elastic.proto.job_folder import default_base, distrust, folder_name, is_ours
from elastic.proto.security import TOKEN, Security, read_token

log = logging.getLogger("elastic")


def main(argv: Sequence[str] | None = None, *, local_rank: bool = False) -> int:
    """Run a job's node to its end; returns the exit code.

    local_rank: the command line is one of torch.distributed.launch (`elastic/options.py`).
    """
    _fill_standard_streams()
    given = sys.argv[1:] if argv is None else argv
    try:
        options = cli.parse(given, os.environ, local_rank=local_rank)
    except Refused as error:
        place = os.environ.get("ELASTIC_TERMINATION_LOG", "/dev/termination-log")
        leave(Path(place), Ending(kind=Ended.USAGE, reason=error.reason))
        raise
    _log_to_stderr()
    if local_rank:
        log.warning(
            "elastic.launch, as torch.distributed.launch, is deprecated: use elastic-run, and read "
            "LOCAL_RANK from the environment instead of --local-rank"
        )
    try:
        checks.open_files()
        return _launch(options)
    except ElasticError as error:
        log.error("%s", error)
        kind = Ended.USAGE if isinstance(error, UsageError) else Ended.STOPPED
        leave(Path(options.termination_log), Ending(kind=kind, reason=str(error)))
        return 2 if kind is Ended.USAGE else 1


def _fill_standard_streams() -> None:
    """A launcher may be started with some of them closed; no socket of ours may take their place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:  # as Python has it where the descriptor was closed
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as we run
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def _launch(options: Options) -> int:
    environ = dict(os.environ)
    ending = dict.fromkeys((*options.signals_to_handle, "SIGTERM"))
    signals = _numbers(name for name in ending if name not in options.drain_signals)
    for number in (*signals, signal.SIGTERM):  # until the guardian handles them
        signal.signal(number, _end_at_once)
    checks.names(options)
    slots = resolve_slots(options.nproc_per_node, environ)
    checks.slots(slots)
    checks.rank_unit(options, slots)
    _default_threads(environ, slots)
    if options.without_effect:
        log.warning("without effect here: %s", ", ".join(options.without_effect))
    if options.overruled:
        log.warning("%s", options.overruled)
    security = _security(options, environ)
    folder = _folder_name(options.run_id)
    run_dir = _job_folder(options.state_dir or options.log_dir, folder)
    log_dir = _job_folder(options.log_dir or options.state_dir, folder)
    found = look_up(options.endpoint_host, options.endpoint_port, options.join_timeout)
    reservation = reserve(options, found)
    if reservation is not None:
        checks.master_files(run_dir, options.report)
    everywhere = reservation is not None and reservation.everywhere
    if not security.token and (everywhere or not found[0].loopback):
        log.warning(
            "no job token: set %s (or --token-file) on every node, so that nobody else can "
            "join this job",
            TOKEN,
        )
    host = own_address(options, found)
    knock = knock_socket(options, host)
    settings = _agent_settings(
        options,
        _workload(options, environ),
        _logs(options, log_dir),
        security,
        slots,
        master=join(
            options.endpoint_host, reservation.port if reservation else options.endpoint_port
        ),
        host=host,
    )
    guardian = _guardian(options, settings, knock, reservation, run_dir)
    code = guardian.run(signals, _numbers(options.drain_signals))
    in_slurm = options.pod is None and environ.get("SLURM_NODEID", "0") == "0"
    if code == DRAINED and guardian.warned and in_slurm:
        slurm.requeue(environ)
    return code


def _end_at_once(number: int, _: FrameType | None) -> NoReturn:
    """A signal while nothing runs yet; a name server that does not answer is left alone."""
    log.warning("%s: ending", signal.Signals(number).name)
    logging.shutdown()
    os._exit(128 + number)


def _guardian(
    options: Options,
    settings: AgentSettings,
    knock: socket.socket,
    reservation: Reservation | None,
    run_dir: Path,
) -> Guardian:
    vault, pulse = Vault(), Pulse(options.lease)
    master = None
    if reservation is not None:
        listen = reservation.listen_address(settings.master)
        launch = secrets.token_hex(16)
        master = partial(_master_main, options, settings, listen, run_dir, launch, vault, pulse)
    return Guardian(
        partial(_agent_main, settings, knock, vault),
        master,
        vault,
        pulse,
        cgroup.create(),
        patience=max(options.shutdown_timeout, options.drain_timeout) + 30.0,
    )


def _numbers(names: Iterable[str]) -> tuple[int, ...]:
    return tuple(signal.Signals[name] for name in names)


def _in_background() -> None:
    """What master and agent need that the guardian, which a terminal has in front, does not."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # under `stty tostop` a line would stop us
    configure_grpc()


def _agent_main(settings: AgentSettings, knock: socket.socket, vault: Vault) -> int:
    _in_background()
    from elastic.agent import agent
    from elastic.agent.logs import tee  # after the fork: grpc has threads

    try:
        return agent.main(settings, knock, vault)
    finally:
        tee.finish()


def _master_main(
    options: Options,
    settings: AgentSettings,
    listen: str,
    run_dir: Path,
    launch: str,
    vault: Vault,
    pulse: Pulse,
) -> int:
    _in_background()
    vault.forget()
    from elastic.master import main as master
    from elastic.master.policy import Policy

    policy = Policy(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        node_unit=options.node_unit,
        rank_unit=options.rank_unit,
        last_call=options.last_call,
        preparation=options.preparation,
        lease=options.lease,
        max_restarts=options.max_restarts,
        fault_budget=options.fault_budget,
        join_timeout=options.join_timeout,
        below_min_timeout=options.below_min_timeout,
        precheck=options.precheck,
        probe_only=options.probe_only,
        exclude_straggler=options.exclude_straggler,
        hang_action=options.hang_action,
        hang_floor=options.hang_floor,
        straggler_interval=options.straggler_interval,
        failure_grace=options.failure_grace,
        drain_timeout=options.drain_timeout,
    )
    return master.main(
        master.MasterSettings(
            run_id=options.run_id,
            address=settings.master,
            listen=listen,
            run_dir=run_dir,
            policy=policy,
            security=settings.security,
            report=Path(options.report).resolve() if options.report else None,
            node_id=settings.node_id,
            launch=launch,
            notify=options.notify,
            beat=pulse.beat,
        )
    )


def _agent_settings(
    options: Options,
    workload: Workload,
    logs: LogSettings,
    security: Security,
    slots: int,
    master: str,
    host: str,
) -> AgentSettings:
    return AgentSettings(
        run_id=options.run_id,
        node_id=options.node_id or f"{socket.gethostname()}-{os.getpid()}",
        slots=slots,
        master=master,
        host=host,
        several_nodes=options.max_nodes > 1,
        workload=workload,
        logs=logs,
        security=security,
        role=options.role,
        labels=options.labels,
        node_rank=options.node_rank,
        max_restarts=options.max_restarts,
        ports=options.port_range,
        rank_start=options.rank_start,
        spare_ranks=options.spare_ranks == "auto",
        virtual_local_rank=options.virtual_local_rank,
        numa_binding=options.numa_binding,
        gpu_nodes=tuple(gpu_nodes()) if options.numa_binding else (),
        timer_pipe=file_timer.pipe(workload.environ),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        signals=options.signals_to_handle,
        drain_signals=options.drain_signals,
        detailed_codes=options.exit_codes == "detailed",
        termination_log=Path(options.termination_log),
        shutdown_timeout=options.shutdown_timeout,
        join_timeout=options.join_timeout,
    )


def _workload(options: Options, environ: dict[str, str]) -> Workload:
    return Workload(
        kind=options.entry_kind,
        entry=options.entry,
        args=options.entry_args,
        python=options.python,
        environ=environ,
        cwd=_working_folder(),
    )


def _logs(options: Options, log_dir: Path) -> LogSettings:
    return LogSettings(
        run_dir=None if options.log_dir == os.devnull else log_dir,
        redirects=options.redirects,
        tee=options.tee,
        local_ranks=options.local_ranks_filter,
        stdout_filters=options.duplicate_stdout_filters,
        stderr_filters=options.duplicate_stderr_filters,
        prefix=options.log_line_prefix_template,
        keep=options.log_keep,
        limit=options.log_limit,
    )


def _security(options: Options, environ: dict[str, str]) -> Security:
    def path(text: str | None) -> Path | None:
        return Path(text) if text else None

    token = read_token(environ, options.token_file)
    if options.require_token and not token:
        raise UsageError(f"--require-token: set {TOKEN}, or --token-file FILE")
    security = Security(
        token=token,
        cert=path(options.tls_cert),
        key=path(options.tls_key),
        ca=path(options.tls_ca),
    )
    security.check()
    return security


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise UsageError("the working directory does not exist any more: cd elsewhere") from error


def _log_to_stderr() -> None:
    level = os.environ.get("ELASTIC_LOGLEVEL") or os.environ.get("LOGLEVEL", "WARNING")
    logging.basicConfig(
        level=level.upper() if level.upper() in logging.getLevelNamesMapping() else "WARNING",
        format="elastic-run: %(message)s",
        handlers=[ConsoleHandler(sys.stderr.fileno())],
    )


def _default_threads(environ: dict[str, str], slots: int) -> None:
    """As torchrun: one OpenMP thread a rank, unless the user says otherwise."""
    if slots > 1 and "OMP_NUM_THREADS" not in environ:
        environ["OMP_NUM_THREADS"] = "1"
        log.warning(
            "OMP_NUM_THREADS is 1 for each rank, so that %d of them do not overload this node; "
            "set it to what suits your job",
            slots,
        )


def _folder_name(run_id: str) -> str:
    """The run id; for a job that nobody named, as in torchrun, with something unique behind it.

    Only who names a job can want to resume it, and two unnamed ones must not meet.
    """
    name = folder_name(run_id)
    return f"{name}_{secrets.token_hex(4)}" if run_id == "none" else name


def _job_folder(base: str | None, name: str) -> Path:
    """`<base>/<name>`, in a folder for temporary files if none was given; made here, so that a
    mistake shows at once."""
    usual = base is None or base == os.devnull
    folder = default_base() if usual else Path(base or "")
    path = folder / name
    try:
        if usual:
            folder.mkdir(exist_ok=True, mode=0o700)
            if not is_ours(folder):
                raise UsageError(
                    f"{folder} is another user's, or others may write there: give --log-dir"
                )
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
        if why := distrust(path):
            raise UsageError(
                f"{why}, and what lies there would be believed: remove it, or give another --log-dir "
                "or --state-dir"
            )
    except OSError as error:
        raise UsageError(f"cannot make {path} for logs and journal: {error.strerror}") from error
    return path.absolute()


if __name__ == "__main__":
    sys.exit(main())

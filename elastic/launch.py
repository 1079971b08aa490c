"""What torch.distributed has under such names, by way of `elastic-run`.

`python -m elastic.launch` takes the place of `python -m torch.distributed.launch`. From Python,
torch.distributed.launcher's `LaunchConfig` and `elastic_launch`:

    from elastic.launch import LaunchConfig, elastic_launch

    if __name__ == "__main__":
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=8)
        results = elastic_launch(config, train)("/data/corpus")    # by global rank

Names, fields, their order and their defaults are torch's. What differs:

* `rdzv_backend` is c10d by default: our master takes the part of torch's default, etcd.
* With one node and no `rdzv_endpoint` any free port is taken.
* Ranks are always fresh processes, or forks of one, and never of this one: whatever `start_method`
  says, function, arguments and results are pickled. A function has a name in a module; the main
  script counts, and is imported again by every rank (as `__mp_main__`, as with multiprocessing's
  spawn), so what it does belongs under `if __name__ == "__main__"`. Tensors travel as copies.
* What goes wrong raises `elastic.proto.errors.JobFailed`, with the job's report.
* A signal is passed on to the ranks; once they have ended it takes its effect here.
* `metrics_cfg` has no effect, and `numa_options` is never chosen for you.
* `logs_specs` is torch's `DefaultLogsSpecs` or ours. None writes to the console alone.
* `elastic` has the flags that only elastic-run has: `elastic={"fault_budget": 10}`.

Imports no torch.
"""

import json
import os
import pickle  # noqa: TID251 - a function and its results: docs/security.md, elastic.launch
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from multiprocessing import process
from pathlib import Path
from types import FrameType
from typing import Any

import elastic
from elastic.agent import call
from elastic.flags import OURS
from elastic.proto import env
from elastic.proto.errors import JobFailed, UsageError

__all__ = ["DefaultLogsSpecs", "JobFailed", "LaunchConfig", "elastic_launch", "launch_agent"]

_DEFAULT_TIMEOUT = 900
_MARK_AND_EXEC = ': > "$0/$ELASTIC_ROUND.$RANK" && exec "$@"'
"""A rank that is a command says that it began, as agent/call.py does for a function."""


@dataclass(kw_only=True)
class DefaultLogsSpecs:
    """Where streams go; torch's class of that name serves as well."""

    log_dir: str | None = None
    redirects: int | Mapping[int, int] = 0
    """1 stdout, 2 stderr, 3 both go to files; or a map from local rank."""
    tee: int | Mapping[int, int] = 0
    """The same, and to the console as well."""
    local_ranks_filter: set[int] | None = None
    """Local ranks that the console shows; None: all."""


@dataclass
class LaunchConfig:
    """How to launch. Raises ValueError where torch's does."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    """Empty: one is made up."""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "c10d"
    rdzv_configs: dict[str, Any] = field(default_factory=dict[str, Any])
    """`timeout` (or `join_timeout`): seconds for the nodes to come together."""
    rdzv_timeout: int = -1
    """Old name of `rdzv_configs["timeout"]`."""
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict[str, str])
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    """torch's NumaOptions, or the name of its affinity mode."""
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    """None: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30 seconds."""
    _: KW_ONLY
    elastic: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Elastic's own flags, with underscores and without the dashes in front."""

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        self.rdzv_configs.setdefault("timeout", _DEFAULT_TIMEOUT)
        if self.shutdown_timeout is None:
            variables = env.process_environment()
            self.shutdown_timeout = int(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must be non-negative, got {self.shutdown_timeout}")


class elastic_launch:
    """`elastic_launch(config, entrypoint)(*args)` runs a job's part on this node to its end.

    entrypoint: a function, or a command.
    Returns what the function returned, by the global rank of this node's ranks (None for a command).
    Raises JobFailed, or UsageError where the configuration or the entrypoint cannot work.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: None = None,
    ) -> None:
        if health_check_server is not None:
            raise UsageError("elastic.launch has no health check server: `elasticctl status` tells")
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str | None, args: list[Any]
) -> dict[int, Any]:
    """What `elastic_launch` does when it is called."""
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
    with tempfile.TemporaryDirectory(prefix="elastic-launch-") as name:  # for its user alone
        folder = Path(name)
        if isinstance(entrypoint, str):
            entry = _command(folder, entrypoint, args)
        elif callable(entrypoint):
            entry = _function(folder, entrypoint, args)
        else:
            raise UsageError("elastic_launch needs a function or a command")
        report = Path(config.elastic.get("report") or folder / "report.json")
        flags = [*_flags(config), "--report", str(report)]
        code, received = _run([*flags, *entry], _environment(config, folder), _signals(config))
        results = {} if code or received else dict(_results(folder))
        failure = _failure(code, report, folder / "error.json") if code else None
    if received:
        signal.raise_signal(received)
        raise JobFailed(f"ended by {signal.Signals(received).name}", exit_code=code)
    if failure is not None:
        raise failure
    return results


# --- the entrypoint ------------------------------------------------------------------------------


def _command(folder: Path, entrypoint: str, args: Sequence[Any]) -> list[str]:
    return ["--no-python", "sh", "-c", _MARK_AND_EXEC, str(folder), entrypoint, *map(str, args)]


def _function(folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    main = _main_module()
    if getattr(function, "__module__", "") == "__main__" and len(main) == 0:
        raise UsageError(
            f"{_name(function)} was defined where no other process can import it from: "
            "put it into a file"
        )
    try:
        (folder / call.CALL).write_bytes(pickle.dumps((function, tuple(args))))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{_name(function)} or an argument cannot be sent to the ranks ({error}): a function "
            "must have a name in a module, and arguments must be picklable"
        ) from error
    data = {
        **main,
        "sys_path": [path or os.getcwd() for path in sys.path],
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
    }
    (folder / call.MAIN).write_text(json.dumps(data))
    return ["-m", call.__name__, str(folder), "${local_rank}"]


def _main_module() -> dict[str, str]:
    """How multiprocessing.spawn.prepare imports the main script again; empty if it cannot."""
    if getattr(process.current_process(), "_inheriting", False):
        raise UsageError(
            "elastic_launch was called while a rank imported the main script: put the call under "
            "`if __name__ == '__main__'`"
        )
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"init_main_from_name": spec.name}
    path = getattr(main, "__file__", None)
    return {} if path is None else {"init_main_from_path": os.path.abspath(path)}


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))


# --- the command line ----------------------------------------------------------------------------


def _flags(config: LaunchConfig) -> list[str]:
    """elastic-run's; all that torch's fields say, so that no PET_ variable says otherwise."""
    endpoint = config.rdzv_endpoint
    if not endpoint and config.max_nodes == 1 and config.rdzv_backend == "c10d":
        endpoint = "localhost:0"
    flags = {
        "nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "nproc-per-node": config.nproc_per_node,
        "rdzv-id": config.run_id,
        "role": config.role,
        "rdzv-backend": config.rdzv_backend,
        "rdzv-endpoint": endpoint or None,
        "rdzv-conf": _rdzv_conf(config.rdzv_configs) or None,
        "node-rank": config.rdzv_configs.get("rank"),
        "max-restarts": config.max_restarts,
        "monitor-interval": config.monitor_interval,
        "start-method": config.start_method,
        "local-addr": config.local_addr,
        "event-log-handler": config.event_log_handler,
        "numa-binding": _affinity(config.numa_options),
        "signals-to-handle": config.signals_to_handle,
        "duplicate-stdout-filters": _words(config.duplicate_stdout_filters),
        "duplicate-stderr-filters": _words(config.duplicate_stderr_filters),
        "virtual-local-rank": config.virtual_local_rank or None,
        "shutdown-timeout": config.shutdown_timeout,
        **_log_flags(config.logs_specs),
    }
    listed = [text for name, value in flags.items() for text in _flag(name, value)]
    return [*listed, *_own_flags(config.elastic)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    return [f"--{name}"] if value is True else [f"--{name}={value}"]


def _rdzv_conf(configs: Mapping[str, Any]) -> str:
    pairs = {k: v for k, v in configs.items() if k not in ("timeout", "rank") and v is not None}
    pairs.setdefault("join_timeout", configs["timeout"])
    return ",".join(f"{key}={value}" for key, value in pairs.items())


def _affinity(options: Any) -> str | None:
    mode = getattr(options, "affinity_mode", options)
    return None if mode is None else str(getattr(mode, "value", mode))


def _words(words: Sequence[str] | None) -> str | None:
    return ",".join(word.replace(",", ",,") for word in words) if words else None


def _log_flags(specs: Any) -> dict[str, str | None]:
    def of(name: str, torchs: str) -> Any:
        return getattr(specs, name, None) or getattr(specs, torchs, None)

    shown = of("local_ranks_filter", "_local_ranks_filter")
    return {
        "log-dir": of("log_dir", "_root_log_dir"),
        "redirects": _streams(of("redirects", "_redirects")),
        "tee": _streams(of("tee", "_tee")),
        "local-ranks-filter": ",".join(map(str, sorted(shown))) if shown else None,
    }


def _streams(spec: Any) -> str | None:
    if isinstance(spec, Mapping):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in spec.items()) or None
    return str(int(spec)) if spec else None


def _own_flags(given: Mapping[str, Any]) -> Iterator[str]:
    known = {flag.dest: flag.name for flag in OURS}
    for dest, value in given.items():
        if dest not in known:
            raise UsageError(
                f"elastic={{{dest!r}: ...}}: there is no such flag; there are "
                f"{', '.join(sorted(known))}"
            )
        if dest == "report":
            continue
        if isinstance(value, Mapping):
            value = [f"{key}={item}" for key, item in value.items()]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield from _flag(known[dest], None if item is False else item)


def _environment(config: LaunchConfig, folder: Path) -> dict[str, str]:
    given = env.process_environment()
    environ = {name: text for name, text in given.items() if not name.startswith("PET_")}
    environ.setdefault("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    if config.log_line_prefix_template is not None:
        environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = config.log_line_prefix_template
    home = str(Path(elastic.__path__[0]).parent)
    if home in (
        path or os.getcwd() for path in sys.path
    ):  # a checkout that is not installed; ranks have our sys.path too
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (given.get("PYTHONPATH"), home)))
    return environ


# --- running -------------------------------------------------------------------------------------


def _signals(config: LaunchConfig) -> list[int]:
    names = (name.strip() for name in config.signals_to_handle.split(","))
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]


def _run(
    argv: Sequence[str], environ: Mapping[str, str], signals: Sequence[int]
) -> tuple[int, int]:
    """Run elastic-run to its end; returns its exit code, and the signal passed on to it or 0."""
    received = 0
    command = [sys.executable, "-m", "elastic.child", str(os.getpid()), *argv]
    launcher = subprocess.Popen(command, env=environ)

    def pass_on(number: int, _: FrameType | None) -> None:
        nonlocal received
        received = number
        launcher.send_signal(number)

    main_thread = threading.current_thread() is threading.main_thread()
    before = {n: signal.signal(n, pass_on) for n in signals} if main_thread else {}
    try:
        return launcher.wait(), received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if (
            launcher.poll() is None
        ):  # an exception of the caller's, raised by a signal we leave alone
            launcher.terminate()
            launcher.wait()


def _results(folder: Path) -> Iterator[tuple[int, Any]]:
    """By global rank, of the last round: a rank that finished earlier may have done so in vain."""
    found = [tuple(map(int, path.name.split("."))) for path in folder.glob("[0-9]*.*[0-9]")]
    last = max((number for number, _ in found), default=0)
    for _, rank in sorted(pair for pair in found if pair[0] == last):
        data = (folder / f"{last}.{rank}").read_bytes()
        yield rank, pickle.loads(data) if data else None


def _failure(code: int, report: Path, error_file: Path) -> UsageError | JobFailed:
    if code == 2:
        return UsageError("elastic-run does not take this configuration; it says why above")
    told = _json(report)
    reason = (told.get("result") or {}).get("reason")
    if not reason:  # not the master's node
        message = _json(error_file).get("message")
        reason = message.get("message") if isinstance(message, dict) else message
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return JobFailed(
        str(reason or f"elastic-run ended with {how}; it says why above"),
        exit_code=code,
        report=told,
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def main() -> int:
    """`python -m elastic.launch`: elastic-run, whose scripts get `--local-rank` as an argument."""
    from elastic import run

    return run.main(local_rank=True)


if __name__ == "__main__":
    sys.exit(main())

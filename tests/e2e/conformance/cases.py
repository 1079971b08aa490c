"""The corpus: what is typed, where, and what is done to it meanwhile.

In arguments and variables `{port}` is a free port, `{tmp}` the run's own folder, `{work}` the
folder the launcher stands in (a copy of `corpus/`), `{python}` this interpreter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class When(Enum):
    """The moment at which a case's signal is sent to the first launcher."""

    RUNNING = "running"  # every rank has said that it is ready
    RENDEZVOUS = "rendezvous"  # `{port}` is being listened on, and half a second has passed


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A signal to the first launcher."""

    number: int
    when: When = When.RUNNING
    ranks: int = 2  # to wait for
    again: bool = False  # once more, when a rank has seen the first


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command line (or one a node) and its surroundings."""

    name: str
    program: str = "run"  # or "launch": the module, of torch.distributed and of elastic
    args: tuple[str, ...] = ()  # after each node's own options
    nodes: tuple[tuple[str, ...], ...] = ((),)  # each node's own options
    env: Mapping[str, str] = field(default_factory=dict)
    node_env: tuple[Mapping[str, str], ...] = ()
    stdin: str | None = None
    signal: Signal | None = None
    forks: bool = True  # also compared with ranks forked from the standby
    timeout: float = 150.0  # seconds; generous, as the machine may be busy
    deaf: tuple[str, ...] = ()  # signals that the launchers are started with ignored
    hangs: bool = False  # one that runs still after `timeout` is an observation, not a failure
    lasts: tuple[float, float] | None = None  # seconds that are as good as one another


TWO = ("--standalone", "--nproc-per-node", "2")
LOGS = ("--log-dir", "{tmp}/logs")
PROBE = ("probe.py",)


def _probe(
    name: str, *args: str, do: str = "", ranks: str = "", others: str = "", **env: str
) -> Case:
    """Two ranks on one node, which do what `do` says."""
    return Case(name=name, args=(*TWO, *args, *PROBE), env=_env(do, ranks, others, env))


def _env(do: str, ranks: str, others: str, env: Mapping[str, str]) -> dict[str, str]:
    named = {"PROBE": do, "PROBE_RANKS": ranks, "PROBE_OTHERS": others}
    return {k: v for k, v in named.items() if v} | dict(env)


def _plain(name: str, *args: str, forks: bool = True, **env: str) -> Case:
    """A whole command line, as typed."""
    return Case(name=name, args=args, env=env, forks=forks)


def _launch(name: str, *args: str, forks: bool = False) -> Case:
    """A command line of `python -m torch.distributed.launch`."""
    return Case(name=name, program="launch", args=(*TWO, *args), forks=forks)


WHAT_A_RANK_SEES = (
    _probe("env"),
    _plain("bare", "probe.py"),
    _plain("auto_c10d", "--nproc-per-node", "2", "probe.py"),
    _plain("nproc_cpu", "--standalone", "--nproc-per-node", "cpu", "probe.py"),
    _plain("nproc_gpu", "--standalone", "--nproc_per_node", "gpu", "probe.py", forks=False),
    _plain("underscores", "--nproc_per_node", "2", "--max_restarts", "3", "probe.py"),
    _plain("abbreviations", "--nproc-p", "2", "--max-r", "2", "--monitor-i", "0.5", "probe.py"),
    _plain("equals", "--nproc-per-node=2", "--max_restarts=1", "--role=x", "probe.py"),
    _plain("script_args", *TWO, "probe.py", "--nproc-per-node", "7", "-m", "--", "--no-python", ""),
    _plain("macro", *TWO, "probe.py", "--device", "${local_rank}", "x${local_rank}y", "${rank}"),
    _plain("module", *TWO, "-m", "pkg.worker", "--a", "b"),
    _plain("module_long", *TWO, "--module", "pkg.worker"),
    _plain("sub_folder", *TWO, "sub/inner.py", "x"),
    _plain("absolute_path", *TWO, "{work}/probe.py"),
    _plain("run_path", *TWO, "--run-path", "probe.py", "--x", forks=False),
    _plain(
        "no_python", *TWO, "--no-python", "{python}", "probe.py", "--id=${local_rank}", forks=False
    ),
    _plain("no_python_binary", *TWO, "--no-python", "sh", "-c", "echo @@ $0", "x${local_rank}",
           forks=False),
    _plain("python_exec", *TWO, "probe.py", PYTHON_EXEC="{work}/wrapper.sh", forks=False),
    _plain("pet", "probe.py", PET_NPROC_PER_NODE="2", PET_MAX_RESTARTS="2", PET_STANDALONE="1",
           PET_ROLE="pet"),
    _plain("pet_overridden", "--nproc-per-node", "2", "--role", "typed", "probe.py",
           PET_NPROC_PER_NODE="3", PET_ROLE="pet"),
    _plain("pet_bad", "probe.py", PET_NPROC_PER_NODE="many", forks=False),
    _probe("omp_set", OMP_NUM_THREADS="3"),
    _plain("omp_one_rank", "--standalone", "probe.py"),
    _probe("nccl_variable_set", TORCH_NCCL_ASYNC_ERROR_HANDLING="0"),
    _probe("role", "--role", "trainer", "--tee", "3"),
    _probe("signals_exported", "--signals-to-handle", "SIGTERM,SIGUSR1"),
    _probe("virtual_local_rank", "--virtual-local-rank"),
    _probe("virtual_local_rank_devices", "--virtual-local-rank", CUDA_VISIBLE_DEVICES="4,5"),
    _plain("standalone_overrides", *TWO, "--rdzv-backend", "static", "--rdzv-id", "mine",
           "--rdzv-endpoint", "127.0.0.1:1", "probe.py"),
    _plain("rdzv_id", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
           "127.0.0.1:{port}", "--rdzv-id", "job-7", "probe.py"),
    _plain("megatron", "--nnodes", "1", "--node_rank", "0", "--master_addr", "127.0.0.1",
           "--master_port", "{port}", "--nproc_per_node", "2", "probe.py"),
    _plain("inherited_rank_variables", *TWO, "probe.py", RANK="5", WORLD_SIZE="9", LOCAL_RANK="3",
           MASTER_ADDR="elsewhere", MASTER_PORT="7"),
    _plain("allreduce", *TWO, "allreduce.py"),
    _probe("timers", TORCHELASTIC_ENABLE_FILE_TIMER="1"),
    _probe("timers_given", TORCHELASTIC_ENABLE_FILE_TIMER="1",
           TORCHELASTIC_TIMER_FILE="{tmp}/pipe"),
    _probe("timers_off", TORCHELASTIC_ENABLE_FILE_TIMER="true",
           TORCHELASTIC_TIMER_FILE="{tmp}/pipe"),
    _launch("launch", "probe.py", "--x", "${local_rank}", forks=True),
    _launch("launch_module", "-m", "pkg.worker", "--a"),
    _launch("launch_run_path", "--run-path", "probe.py", "--x"),
    _launch("launch_use_env", "--use-env", "probe.py", "--x"),
    _launch("launch_use_env_underscore", "--use_env", "--no-python", "{python}", "probe.py"),
    _launch("launch_use_env_short", "--use", "probe.py"),
    Case(name="stdin", args=("--standalone", "probe.py"), stdin="hello\n", env={"PROBE": "read"},
         forks=False),
)  # fmt: skip

LOGS_AND_CONSOLE = (
    *(_probe(f"redirects_{n}", *LOGS, "--redirects", str(n)) for n in range(4)),
    *(_probe(f"tee_{n}", *LOGS, "--tee", str(n)) for n in (1, 2, 3)),
    _probe("redirects_map", *LOGS, "-r", "0:1,1:2"),
    _probe("tee_map", *LOGS, "-t", "1:3"),
    _probe("redirects_and_tee", *LOGS, "--redirects", "3", "--tee", "0:1"),
    _plain("tee_two_digits", "--standalone", "--nproc-per-node", "12", *LOGS, "--tee", "10:1",
           "probe.py", forks=False),
    _probe("logs_in_tmp", "--tee", "3"),
    _probe("log_dir_null", "--log-dir", "/dev/null"),
    _probe("log_dir_null_tee", "--log-dir", "/dev/null", "--tee", "3"),
    _probe("log_dir_relative", "--log-dir", "logs", "--redirects", "3"),
    _probe("prefix", *LOGS, "--tee", "3",
           TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${role_name}|${rank}|${local_rank}> "),
    _probe("filter_ranks", "--local-ranks-filter", "0"),
    _probe("filter_ranks_tee", *LOGS, "--local-ranks-filter", "1", "--tee", "3"),
    _probe("filter_ranks_redirects", *LOGS, "--local-ranks-filter", "1", "--redirects", "3"),
    _probe("duplicate_filters", *LOGS, "--tee", "3", "--duplicate-stdout-filters", "keep,last",
           "--duplicate-stderr-filters", "first"),
    _probe("duplicate_filters_no_tee", *LOGS, "--duplicate-stdout-filters", "keep"),
    Case(name="log_limit", args=(*TWO, *LOGS, "--redirects", "1", *PROBE), forks=False,
         env={"PROBE": "print:800", "PROBE_RANKS": "1", "ELASTIC_LOG_LIMIT": "10K"}),
    Case(name="log_keep", args=(*TWO, *LOGS, "--tee", "1", "--max-restarts", "2", *PROBE),
         env={"PROBE": "exit:5", "ELASTIC_LOG_KEEP": "1"}, forks=False),
    _probe("log_attempts", *LOGS, "--tee", "3", "--max-restarts", "1", do="exit-first:5",
           ranks="0", others="sleep:3"),
)  # fmt: skip

HOW_IT_ENDS = (
    _probe("exit_3", do="exit:3"),
    _probe("exit_3_one", do="exit:3", ranks="1"),
    _probe("exit_3_other_saves", do="exit:3", ranks="1", others="save"),
    _probe("exit_256", do="exit:256"),
    _probe("exit_negative", do="exit:-1"),
    _probe("raises", do="raise", ranks="0"),
    _probe("text", do="text", ranks="1"),
    _probe("segv", do="kill:11", ranks="1", others="wait"),
    _probe("killed_first", do="kill-first:9", ranks="1", others="sleep:2"),
    _probe("terminated_first", do="kill-first:15", ranks="1", others="sleep:2"),
    _probe("restart_once", "--max-restarts", "1", do="exit-first:5"),
    _probe("restarts_used_up", "--max-restarts", "1", do="exit:5"),
    Case(name="same_failure", args=("--standalone", *LOGS, "--max-restarts", "5", *PROBE),
         env={"PROBE": "exit:3"}, forks=False),
    _probe("error_file", *LOGS, do="exit:3", TORCHELASTIC_ERROR_FILE="{tmp}/error.json"),
    *(
        Case(
            name=f"recorded_{kind}",
            args=(*TWO, *LOGS, "recorded.py"),
            env={
                "PROBE": do, "PROBE_RANKS": "1", "PROBE_OTHERS": others,
                "TORCHELASTIC_ERROR_FILE": "{tmp}/error.json",
            },
        )
        for kind, do, others in (
            ("raise", "raise", "sleep:20"), ("exit", "exit:3", "sleep:20"), ("zero", "exit:0", "")
        )
    ),
    _plain("timer_expires", *TWO, "timed.py", TORCHELASTIC_ENABLE_FILE_TIMER="1",
           TORCHELASTIC_ERROR_FILE="{tmp}/error.json", forks=False),
    Case(name="child_left_by_success", args=("--standalone", "probe.py"),
         env={"PROBE": "child:session"}),
    Case(name="child_left_by_failure", args=("--standalone", "probe.py"),
         env={"PROBE": "child:group", "PROBE_CODE": "3"}),
)  # fmt: skip


def _signalled(
    name: str,
    number: int,
    *args: str,
    do: str = "wait",
    again: bool = False,
    lasts: tuple[float, float] | None = None,
) -> Case:
    signal = Signal(number=number, again=again)
    return Case(
        name=name, args=(*TWO, *args, *PROBE), env={"PROBE": do}, signal=signal, lasts=lasts
    )


C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}")

SIGNALS = (
    _signalled("sighup", 1),
    _signalled("sigint", 2),
    _signalled("sigquit", 3),
    _signalled("sigterm", 15),
    _signalled("sigusr1_handled", 10, "--signals-to-handle", "SIGTERM,SIGUSR1"),
    Case(name="started_deaf", args=(*TWO, "--signals-to-handle", "SIGTERM", *PROBE),
         deaf=("HUP", "INT", "USR1", "TERM")),
    _signalled("sigterm_ignored", 15, "--shutdown-timeout", "2", do="stay",
               lasts=(2, 12)),
    _signalled("second_sigint", 2, do="stay", again=True, lasts=(0, 20)),
    Case(name="sigterm_in_rendezvous", args=("--nnodes", "2", *C10D, *PROBE), forks=False,
         signal=Signal(number=15, when=When.RENDEZVOUS)),
    Case(name="sigint_in_rendezvous", args=("--nnodes", "2", *C10D, *PROBE), forks=False,
         signal=Signal(number=2, when=When.RENDEZVOUS)),
    Case(name="sighup_in_rendezvous", args=("--nnodes", "2", *C10D, *PROBE), forks=False,
         signal=Signal(number=1, when=When.RENDEZVOUS)),
    Case(name="join_timeout", args=("--nnodes", "2", *C10D, "--rdzv-conf", "join_timeout=4",
         *PROBE), forks=False),
)  # fmt: skip

STATIC = ("--master_addr", "127.0.0.1", "--master_port", "{port}")
RANKED = (("--node_rank", "0"), ("--node_rank", "1"))
CLOUD = tuple(
    {"WORLD_SIZE": "2", "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
    for rank in ("0", "1")
)

TWO_NODES = (
    Case(name="static_two", nodes=RANKED, args=("--nnodes", "2", *STATIC, *PROBE)),
    Case(name="static_two_endpoint", nodes=RANKED, args=("--nnodes", "2", "--rdzv-endpoint",
         "127.0.0.1:{port}", "--nproc-per-node", "2", *PROBE)),
    Case(name="static_two_uneven", args=("--nnodes", "2", *STATIC, *PROBE), nodes=(
         ("--node_rank", "0", "--nproc_per_node", "1"),
         ("--node_rank", "1", "--nproc_per_node", "2"))),
    Case(name="cloud_two", nodes=RANKED, node_env=CLOUD, args=("--nnodes", "2",
         "--nproc_per_node", "8", *STATIC, "-m", "pkg.worker", "--a", "b")),
    Case(name="cloud_two_expanded", node_env=CLOUD, args=(
         "--nproc_per_node", "2", *STATIC, *PROBE),
         nodes=tuple(("--nnodes", e["WORLD_SIZE"], "--node_rank", e["RANK"]) for e in CLOUD)),
    Case(name="c10d_two", nodes=((), ()), args=("--nnodes", "2", *C10D, *PROBE)),
    Case(name="c10d_two_id", nodes=((), ()), args=("--nnodes", "2", *C10D, "--rdzv-id", "job-7",
         "--nproc-per-node", "2", *LOGS, "--tee", "3", *PROBE)),
    Case(name="c10d_range", nodes=((), ()), args=("--nnodes", "1:2", *C10D, "--rdzv-conf",
         "last_call_timeout=30", *PROBE)),
    Case(name="static_two_allreduce", nodes=RANKED, args=("--nnodes", "2", *STATIC,
         "allreduce.py")),
    Case(name="static_restart", nodes=RANKED, args=("--nnodes", "2", *STATIC, "--max-restarts",
         "1", *PROBE), env={"PROBE": "exit-first:5", "PROBE_RANKS": "1", "PROBE_OTHERS": "sleep:2"},
         forks=False),
    Case(name="c10d_restart", nodes=((), ()), args=("--nnodes", "2", *C10D, "--max-restarts",
         "1", *PROBE), env={"PROBE": "exit-first:5", "PROBE_RANKS": "1", "PROBE_OTHERS": "sleep:3"},
         forks=False),
    Case(name="static_one_fails", nodes=RANKED, args=("--nnodes", "2", *STATIC, *PROBE),
         env={"PROBE": "exit:3", "PROBE_RANKS": "1", "PROBE_OTHERS": "sleep:2"}, forks=False,
         timeout=40.0, hangs=True),
)  # fmt: skip

MISTAKES = (
    _plain("help", "--help", forks=False),
    _plain("no_script", "--standalone", forks=False),
    _plain("unknown_option", "--no-such-option", "probe.py", forks=False),
    _plain("ambiguous_option", "--nproc", "2", "probe.py", forks=False),
    _plain("bad_integer", "--max-restarts", "x", "probe.py", forks=False),
    _plain("bad_nproc", "--nproc-per-node", "many", "probe.py", forks=False),
    _plain("zero_nproc", "--standalone", "--nproc-per-node", "0", "probe.py", forks=False),
    _plain("nnodes_backwards", "--nnodes", "3:2", *C10D, "probe.py", forks=False),
    _plain("nnodes_zero", "--nnodes", "0", "probe.py", forks=False),
    _plain("bad_redirects", *TWO, "--redirects", "7", "probe.py", forks=False),
    _plain("bad_backend", "--rdzv-backend", "nope", "probe.py", forks=False),
    _plain("bad_rdzv_conf", *C10D, "--rdzv-conf", "join_timeout", "probe.py", forks=False),
    _plain("bad_signal", *TWO, "--signals-to-handle", "SIGNOPE", "probe.py", forks=False),
    _plain("negative_restarts", *TWO, "--max-restarts", "-1", "probe.py", forks=False),
    _plain("missing_script", *TWO, "absent.py", forks=False),
    _plain("missing_module", *TWO, "-m", "absent", forks=False),
    _plain("missing_binary", *TWO, "--no-python", "./absent", forks=False),
    _plain("module_and_no_python", *TWO, "-m", "--no-python", "pkg.worker", forks=False),
    _launch("launch_no_python", "--no-python", "{python}", "probe.py"),
    _launch("launch_unknown_option", "--local-rank", "1", "probe.py"),
    _plain("use_env", *TWO, "--use-env", "probe.py", forks=False),
    _plain("run_path_and_no_python", *TWO, "--run-path", "--no-python", "probe.py", forks=False),
)  # fmt: skip

NOT_OURS = (
    _plain("logs_specs", *TWO, "--logs-specs", "mine", "probe.py", forks=False),
    _plain("rdzv_plug_in", *TWO[1:], "--rdzv-backend", "mine", "--rdzv-endpoint",
           "127.0.0.1:{port}", "probe.py", forks=False),
    _plain("rdzv_etcd", "--rdzv-backend", "etcd", "--rdzv-endpoint", "127.0.0.1:{port}",
           "probe.py", forks=False),
    _plain("events", *TWO, "--event-log-handler", "console", "--monitor-interval", "0.2",
           "--start-method", "fork", "--rdzv-conf", "mine=1", "probe.py"),
    Case(name="monitor_interval", args=(*TWO, "--monitor-interval", "15", *PROBE), lasts=(0, 14),
         forks=False),
)  # fmt: skip

CASES = {
    case.name: case
    for group in (
        WHAT_A_RANK_SEES,
        LOGS_AND_CONSOLE,
        HOW_IT_ENDS,
        SIGNALS,
        TWO_NODES,
        MISTAKES,
        NOT_OURS,
    )
    for case in group
}

"""`elastic.launch` against torch's own, and with real ranks."""

import dataclasses
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from elastic import launch, options
from elastic.launch import DefaultLogsSpecs, JobFailed, LaunchConfig, elastic_launch
from elastic.proto.errors import UsageError

DEADLINE = 150
"""Seconds that anything here may take."""

FUNCTIONS = '''
"""Functions that ranks find by name."""
import os, sys
from pathlib import Path

RANK, ROUND = int(os.environ.get("RANK", -1)), int(os.environ.get("ELASTIC_ROUND", -1))

def where(first, local_rank):
    print("out of", RANK)
    world = int(os.environ["WORLD_SIZE"])
    return first, local_rank, RANK, world, os.environ["TORCHELASTIC_RUN_ID"], Path("x")

def fail(message):
    if RANK == 1:
        raise ValueError(message)
    Path(os.environ["FIFO"]).read_text()    # until it is ended

def fail_once():
    if RANK == 1 and ROUND == 1:
        raise ValueError("the first time")
    return ROUND

def leave():
    sys.exit(0)

def not_picklable():
    return lambda: None
'''


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that this process and its ranks can import."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setenv("FIFO", str(tmp_path / "fifo"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    import functions  # type: ignore[import-not-found]

    yield functions
    del sys.modules["functions"]


def config(tmp_path: Path, **fields: Any) -> LaunchConfig:
    """Two ranks here, no restarts."""
    own = {"state_dir": str(tmp_path / "state"), **fields.pop("elastic", {})}
    defaults = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, "max_restarts": 0}
    return LaunchConfig(**{**defaults, **fields}, elastic=own)


# --- as torch's ----------------------------------------------------------------------------------


def test_fields_are_torchs() -> None:
    from torch.distributed.launcher import api

    ours = {field.name: field for field in dataclasses.fields(LaunchConfig)}
    theirs = {field.name: field for field in dataclasses.fields(api.LaunchConfig)}
    assert list(ours)[: len(theirs)] == list(theirs)
    assert list(ours)[len(theirs) :] == ["elastic"]
    plain, torchs = LaunchConfig(1, 2, 3), api.LaunchConfig(1, 2, 3)
    values = {name: (getattr(plain, name), getattr(torchs, name)) for name in theirs}
    differ = {name for name, (mine, other) in values.items() if mine != other}
    # torch makes objects of its own where we keep None.
    assert differ <= {"rdzv_backend", "logs_specs", "numa_options"}
    assert (plain.rdzv_backend, plain.logs_specs) == ("c10d", None)
    for bad in (-1, -5):
        with pytest.raises(ValueError, match="shutdown_timeout must be non-negative"):
            LaunchConfig(1, 1, 1, shutdown_timeout=bad)


def test_needs_no_torch() -> None:
    code = "import sys, elastic.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=150).returncode == 0


def test_every_field_reaches_elastic_run(tmp_path: Path) -> None:
    made = LaunchConfig(
        2, 4, 3,
        logs_specs=DefaultLogsSpecs(
            log_dir="logs", redirects=3, tee={0: 1, 2: 2}, local_ranks_filter={2, 0}
        ),
        run_id="night/7",
        rdzv_endpoint="[::1]:2000",
        rdzv_configs={"is_host": False, "timeout": 33},
        local_addr="::1",
        signals_to_handle="SIGUSR1",
        duplicate_stdout_filters=["a,b", "c"],
        virtual_local_rank=True,
        numa_options="socket",
        shutdown_timeout=4,
        elastic={"failure_grace": 1.5, "label": {"rack": "r7", "row": "2"}, "node_unit": 2},
    )  # fmt: skip
    found = options.parse([*launch._flags(made), "script.py"], {})
    assert (found.min_nodes, found.max_nodes, found.nproc_per_node) == (2, 4, "3")
    assert (found.run_id, found.rdzv_backend, found.role) == ("night/7", "c10d", "default_role")
    assert (found.endpoint_host, found.endpoint_port) == ("::1", 2000)
    assert (found.hosts_master, found.join_timeout, found.max_restarts) == (False, 33.0, 3)
    assert (found.log_dir, found.redirects, found.tee) == ("logs", 3, {0: 1, 2: 2})
    assert found.local_ranks_filter == frozenset({0, 2})
    assert found.duplicate_stdout_filters == ("a,b", "c")
    assert (found.signals_to_handle, found.shutdown_timeout) == (("SIGUSR1",), 4.0)
    assert (found.local_addr, found.virtual_local_rank, found.numa_binding) == (
        "::1", True, "socket",
    )  # fmt: skip
    assert (found.failure_grace, found.node_unit) == (1.5, 2)
    assert found.labels == {"rack": "r7", "row": "2"}
    assert found.without_effect == ()


def test_torchs_objects_are_understood(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs as Specs
    from torch.distributed.elastic.multiprocessing import Std
    from torch.numa.binding import AffinityMode, NumaOptions

    made = LaunchConfig(
        1, 1, 2,
        logs_specs=Specs(log_dir=str(tmp_path), tee={0: Std.ALL, 1: Std.ERR}, redirects=Std.OUT),
        numa_options=NumaOptions(affinity_mode=AffinityMode.CORE_COMPLEX),
        rdzv_backend="static",
        rdzv_endpoint="localhost:2000",
        rdzv_configs={"rank": 0},
        rdzv_timeout=7,
        run_id="mine",
    )  # fmt: skip
    found = options.parse([*launch._flags(made), "script.py"], {})
    assert (found.log_dir, found.redirects, found.tee) == (str(tmp_path), 1, {0: 3, 1: 2})
    assert (found.numa_binding, found.rdzv_backend, found.node_rank) == (
        "core-complex",
        "static",
        0,
    )
    assert found.join_timeout == 7.0


# --- with ranks ----------------------------------------------------------------------------------


def test_results_by_rank(tmp_path: Path, functions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "no number")  # torch's launcher does not look at these
    made = config(tmp_path, run_id="seven", logs_specs=DefaultLogsSpecs(redirects=1))
    given = {"any": (1, b"object")}
    results = elastic_launch(made, functions.where)(given, "rank ${local_rank}")
    assert results == {
        rank: (given, f"rank {rank}", rank, 2, "seven", Path("x")) for rank in (0, 1)
    }
    log = tmp_path / "state" / "seven" / "attempt_0" / "1" / "stdout.log"
    assert log.read_text() == "out of 1\n"


def test_results_of_the_last_round(tmp_path: Path, functions: Any) -> None:
    assert elastic_launch(config(tmp_path, max_restarts=1), functions.fail_once)() == {0: 2, 1: 2}


def test_a_rank_that_exits_with_0_returned_nothing(tmp_path: Path, functions: Any) -> None:
    assert elastic_launch(config(tmp_path), functions.leave)() == {0: None, 1: None}


def test_failure(tmp_path: Path, functions: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobFailed, match=r"rank 1 on .* raised ValueError: bad luck") as caught:
        elastic_launch(config(tmp_path), functions.fail)("bad luck")
    assert caught.value.exit_code == 1
    assert caught.value.report["failures"][0]["error_type"] == "ValueError"
    assert "ValueError: bad luck" in capfd.readouterr().err
    assert list((tmp_path / "state").glob("*/attempt_0/1/error.json"))


def test_a_result_that_cannot_be_sent(tmp_path: Path, functions: Any) -> None:
    with pytest.raises(JobFailed, match=r"rank \d on .* raised .*'not_picklable\."):
        elastic_launch(config(tmp_path), functions.not_picklable)()


def test_command(tmp_path: Path) -> None:
    script = 'echo $RANK "$@" > "$0"/$RANK'
    args = ("-c", script, str(tmp_path), "${local_rank}", 7, "a b")
    assert elastic_launch(config(tmp_path), "sh")(*args) == {0: None, 1: None}
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 0 7 a b\n", "1 1 7 a b\n"]


def test_command_fails(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="exited with 3"):
        elastic_launch(config(tmp_path), "sh")("-c", "exit 3")


# --- mistakes ------------------------------------------------------------------------------------


def test_mistakes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="must have a name in a module"):
        elastic_launch(config(tmp_path), lambda: None)()
    with pytest.raises(UsageError, match="there is no such flag; there are "):
        elastic_launch(config(tmp_path, elastic={"fault_budgte": 1}), "true")()
    with pytest.raises(UsageError, match="a function or a command"):
        elastic_launch(config(tmp_path), None)()
    with pytest.raises(UsageError, match="it says why above"):
        elastic_launch(config(tmp_path, rdzv_backend="etcd"), "true")()
    assert "use --rdzv-backend c10d" in capfd.readouterr().err


# --- the main script -----------------------------------------------------------------------------


def script(tmp_path: Path, body: str) -> subprocess.Popen[str]:
    path = tmp_path / "main.py"
    path.write_text(textwrap.dedent(body))
    environ = {**os.environ, "FIFO": str(tmp_path / "fifo"), "STATE": str(tmp_path / "state")}
    return subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, str(path), "an", "argument"],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


HEAD = """
import os, sys
from dataclasses import dataclass
from elastic.launch import LaunchConfig, elastic_launch

config = LaunchConfig(1, 1, 2, max_restarts=0, elastic={"state_dir": os.environ["STATE"]})
"""


def test_a_function_of_the_main_script(tmp_path: Path) -> None:
    body = """
    @dataclass
    class Answer:
        rank: int
        argv: list[str]

    def train(answer):
        return Answer(answer.rank + int(os.environ["RANK"]), sys.argv[1:])

    if __name__ == "__main__":
        results = elastic_launch(config, train)(Answer(40, []))
        assert all(isinstance(answer, Answer) for answer in results.values())
        print({rank: (answer.rank, answer.argv) for rank, answer in results.items()})
    """
    with script(tmp_path, HEAD + textwrap.dedent(body)) as main:
        out, err = main.communicate(timeout=DEADLINE)
    assert main.returncode == 0, err
    assert out == "{0: (40, ['an', 'argument']), 1: (41, ['an', 'argument'])}\n"


def test_a_main_script_without_a_guard(tmp_path: Path) -> None:
    body = """
    def train(): ...

    elastic_launch(config, train)()
    """
    with script(tmp_path, HEAD + textwrap.dedent(body)) as main:
        _, err = main.communicate(timeout=DEADLINE)
    assert main.returncode == 1
    assert "put the call under `if __name__ == '__main__'`" in err.splitlines()[-1]


WAITING = """
def train():
    with open(os.environ["FIFO"], "w") as fifo:
        print(os.getpid(), file=fifo, flush=True)
        sys.stdin.close()
        import signal
        signal.pause()

if __name__ == "__main__":
    elastic_launch(config, train)()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """However the launching process is ended, so are its ranks."""
    os.mkfifo(tmp_path / "fifo")
    with script(tmp_path, HEAD + WAITING) as main:
        with open(tmp_path / "fifo") as fifo:
            ranks = [os.pidfd_open(int(fifo.readline())) for _ in range(2)]
        main.send_signal(number)
        _, err = main.communicate(timeout=DEADLINE)
        for rank in ranks:
            readable, _, _ = select.select([rank], [], [], DEADLINE)
            assert readable
            os.close(rank)
    if number is signal.SIGINT:
        assert err.splitlines()[-1] == "KeyboardInterrupt"
    else:
        assert main.returncode == -number

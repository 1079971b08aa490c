"""Run one case under one launcher and gather what can be seen of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.harness.ports import free_port

from .cases import Case, Signal, When

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KEPT = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
# A shell without job control starts what it puts in the background deaf to two of these, nohup to HUP.
HEAR = ("env", "--default-signal=HUP,INT,QUIT")
STILL_RUNNING = 999  # in place of an exit code
CARELESS = 0.05  # seconds between looks at a folder


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A launcher is a package whose module a case names.

    warm: if not None, restart each case once, when a sibling of the ranks of this title is ready.
    """

    name: str
    package: str
    flags: tuple[str, ...] = ()
    warm: str | None = None

    def command(self, program: str) -> tuple[str, ...]:
        """What goes before the arguments of a case."""
        return (sys.executable, "-m", f"{self.package}.{program}", *self.flags)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What came out of one run, not yet normalised."""

    case: str
    launcher: str
    exits: tuple[int, ...]  # a node each; as subprocess has them
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    dumps: Mapping[str, object]  # file name in the out folder -> JSON
    files: Mapping[str, str | None]  # below tmp/ and work/logs: text; None for a folder
    children_left: tuple[str, ...]
    ranks_left: tuple[str, ...]
    seconds: float  # from the signal, or else from the start, to the last launcher's end
    launcher_pids: tuple[int, ...]
    port: int
    tmp: Path = field(compare=False)


def run(case: Case, launcher: Launcher) -> Observation:
    """Run `case` in a folder of its own; AssertionError if it does not end in time."""
    tmp = Path(tempfile.mkdtemp(prefix="conformance_"))
    try:
        return _run(case, launcher, tmp)
    finally:
        for pid in _marked(tmp):
            _kill(pid)
        shutil.rmtree(tmp, ignore_errors=True)


def _run(case: Case, launcher: Launcher, tmp: Path) -> Observation:
    work, out, port = tmp / "work", tmp / "out", free_port()
    shutil.copytree(HERE / "corpus", work, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (out, tmp / "tmp"):
        folder.mkdir()
    if launcher.warm is not None:
        (out / "warm").write_text(launcher.warm)
    started = time.monotonic()
    with _launched(case, launcher, tmp, port) as nodes:
        if case.signal is not None:
            _await_moment(case.signal, nodes, out, port)
            started = time.monotonic()
            nodes[0].send_signal(case.signal.number)
            if case.signal.again:
                _until(lambda: any(out.glob("signals.*")) or nodes[0].poll() is not None, 60)
                nodes[0].send_signal(case.signal.number)
        deadline = time.monotonic() + case.timeout
        exits = tuple(_wait(case, launcher, node, deadline) for node in nodes)
        seconds = time.monotonic() - started
    numbers = range(len(nodes))
    return Observation(
        case=case.name,
        launcher=launcher.name,
        exits=exits,
        stdout=tuple((tmp / f"{n}.stdout").read_text(errors="replace") for n in numbers),
        stderr=tuple((tmp / f"{n}.stderr").read_text(errors="replace") for n in numbers),
        dumps={
            path.name: json.loads(path.read_text())
            for path in sorted(out.iterdir())
            if path.name.partition(".")[0] in ("rank", "signals", "sum") and path.suffix != ".part"
        },
        files=_tree(tmp),
        children_left=_still_there(out, "child"),
        ranks_left=_still_there(out, "pid"),
        seconds=seconds,
        launcher_pids=tuple(node.pid for node in nodes),
        port=port,
        tmp=tmp,
    )


@contextmanager
def _launched(
    case: Case, launcher: Launcher, tmp: Path, port: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The case's launchers, one a node, each in a session of its own; killed on the way out."""
    work = tmp / "work"
    spare = os.open("/dev/null", os.O_RDONLY)  # inheritable: what of it reaches a rank?
    fill = {"port": port, "tmp": tmp, "work": work, "python": sys.executable}
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number, own in enumerate(case.nodes):
            extra = case.node_env[number] if case.node_env else {}
            stdin = tmp / "stdin"
            stdin.write_text(case.stdin or "")
            with (
                stdin.open("rb") as source,
                (tmp / f"{number}.stdout").open("wb") as out,
                (tmp / f"{number}.stderr").open("wb") as err,
            ):
                nodes.append(
                    subprocess.Popen(
                        [
                            *HEAR,
                            *_deafness(case),
                            *launcher.command(case.program),
                            *_restarts(case, launcher),
                        ]
                        + [_fill(arg, fill) for arg in (*own, *case.args)],
                        cwd=work,
                        env=_environment(tmp, number)
                        | {k: _fill(v, fill) for k, v in {**case.env, **extra}.items()},
                        stdin=source,
                        stdout=out,
                        stderr=err,
                        start_new_session=True,
                        umask=0o027,
                        pass_fds=(spare,),
                    )
                )
            if len(case.nodes) > 1 and number == 0:
                _until(lambda: _listening(port) or nodes[0].poll() is not None, 90)
        yield nodes
    finally:
        os.close(spare)
        for node in nodes:
            if node.poll() is None:
                _kill(node.pid)
                node.wait()


def _deafness(case: Case) -> tuple[str, ...]:
    return (f"--ignore-signal={','.join(case.deaf)}",) if case.deaf else ()


def _restarts(case: Case, launcher: Launcher) -> tuple[str, ...]:
    """The warm-up's failure must be paid for: a higher limit where the case sets none."""
    given = any(arg.startswith(("--max-r", "--max_r")) for arg in case.args)
    if launcher.warm is None or given or any(k.startswith("PET_MAX") for k in case.env):
        return ()
    return ("--max-restarts", "1")


def _environment(tmp: Path, node: int) -> dict[str, str]:
    """A small, fixed environment; the checkout on PYTHONPATH for every launcher alike."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(tmp / "tmp"),
        "PROBE_OUT": str(tmp / "out"),
        "PROBE_NODE": str(node),
        "PROBE_PYTHON": sys.executable,
        "UNRELATED": "a b",
    }


def _fill(text: str, values: Mapping[str, object]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text


def _await_moment(
    moment: Signal, nodes: list[subprocess.Popen[bytes]], out: Path, port: int
) -> None:
    def over() -> bool:
        return nodes[0].poll() is not None

    if moment.when is When.RENDEZVOUS:
        _until(lambda: _listening(port) or over(), 90)
        time.sleep(0.5)  # torchrun shows nothing of when it has begun to wait for others
        return
    _until(lambda: over() or len(list(out.glob("ready.*.*.*"))) >= moment.ranks, 120)
    time.sleep(0.2)


def _wait(case: Case, launcher: Launcher, node: subprocess.Popen[bytes], deadline: float) -> int:
    try:
        return node.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        if case.hangs:
            return STILL_RUNNING
        raise AssertionError(f"{case.name} under {launcher.name} did not end in time") from None


def _until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"the moment for a signal did not come in {seconds:.0f} s"
        time.sleep(CARELESS)


def _listening(port: int) -> bool:
    """Whether any local socket listens on `port`; connecting would disturb it."""
    wanted = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[1].endswith(wanted) and columns[3] == "0A":
                return True
    return False


def _tree(tmp: Path) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for top in ("tmp", "logs", "work/logs"):
        for path in sorted((tmp / top).rglob("*")):
            name = str(path.relative_to(tmp))
            if path.is_file():
                found[name] = path.read_text(errors="replace")
            else:
                found[name] = None if path.is_dir() else "<special>"
    error = tmp / "error.json"
    if error.exists():
        found["error.json"] = error.read_text()
    return found


def _still_there(out: Path, kind: str) -> tuple[str, ...]:
    """Names of the files that hold the pid of a process that lives, and is not about to end."""
    pids = {path.name: json.loads(path.read_text()) for path in sorted(out.glob(f"{kind}.*"))}
    end = time.monotonic() + 1
    while any(map(_alive, pids.values())) and time.monotonic() < end:
        time.sleep(CARELESS)
    return tuple(name for name, pid in pids.items() if _alive(pid))


def _alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _marked(tmp: Path) -> Iterator[int]:
    """Every process with this run's folder in its environment."""
    marker = f"PROBE_OUT={tmp}/out".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker in (entry / "environ").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return

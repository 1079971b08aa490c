"""`elasticctl` against real jobs: alive, restarted, over, and killed without a word."""

import contextlib
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from elastic import ctl
from elastic.master import commands
from elastic.proto import job_folder
from elastic.proto.verbs import age
from tests.elastic.asking import Ask, columns, elasticctl

# One worker runs one job for most of these.
pytestmark = pytest.mark.xdist_group("ctl")

DEADLINE = 150
"""Seconds that anything here may take."""

JOB_COLUMNS = ["JOB", "PHASE", "ROUND", "WORLD", "STEP", "RESTARTS", "GOODPUT", "AGE"]
NODE_COLUMNS = ["NODE", "STATE", "RANKS", "STEP", "PHASE", "STARTED-BY", "HOST"]

SCRIPT = """
import os, sys
from elastic import session

rank, number = os.environ["RANK"], os.environ["ELASTIC_ROUND"]
for step in range(1, 101):
    print(f"rank {rank} step {step}")
print(f"end of rank {rank} in round {number}", flush=True)
print("a word on stderr", file=sys.stderr, flush=True)
session.step(100)
session.phase("waiting")
with open(os.environ["GATE"]) as gate:   # opens once the test does
    gate.read()
"""


@dataclass
class Running:
    """A job of two ranks that ends when its gate opens."""

    launcher: subprocess.Popen[bytes]
    base: Path
    gate: Path
    environ: dict[str, str]

    @property
    def folder(self) -> Path:
        found = job_folder.find_newest(self.base)
        assert found is not None
        return found

    @property
    def note(self) -> job_folder.MasterNote:
        note = job_folder.read_note(self.folder)
        assert note is not None
        return note

    def follow(self, until: Callable[[str], bool]) -> list[str]:
        """Lines of `elasticctl events --follow`, up to the one that fits."""
        command = elasticctl("--dir", str(self.base), "events", "--follow")
        seen = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environ) as run:
            watchdog = threading.Timer(DEADLINE, run.kill)
            watchdog.start()
            assert run.stdout is not None
            for line in run.stdout:
                seen.append(line.rstrip("\n"))
                if until(line):
                    break
            run.kill()
            watchdog.cancel()
        return seen

    def is_waiting(self) -> bool:
        """Whether the master has heard that both ranks are at their gate."""
        command = elasticctl("--dir", str(self.base), "-o", "json", "status")
        answer = subprocess.run(command, capture_output=True, env=self.environ, check=True)
        (node,) = json.loads(answer.stdout)["nodes"]
        return [(rank["step"], rank["phase"]) for rank in node["ranks"]] == [(100, "waiting")] * 2

    def open_gate(self) -> None:
        """Let the ranks end: each reads to the end of what nobody writes, also one that comes late."""
        pipe = os.open(self.gate, os.O_WRONLY)
        opened = self.gate.with_name("opened")
        opened.touch()
        os.replace(opened, self.gate)
        os.close(pipe)

    def finish(self) -> int:
        self.open_gate()
        return self.launcher.wait(DEADLINE)


def start(base: Path, *flags: str, **environ: str) -> Running:
    base.mkdir(parents=True, exist_ok=True)
    script, gate = base.parent / "script.py", base.parent / "gate"
    script.write_text(SCRIPT)
    os.mkfifo(gate)
    env = {**os.environ, "GATE": str(gate), **environ}
    command = [sys.executable, "-m", "elastic.run", "--standalone", "--nproc-per-node", "2"]
    with open(base.parent / "elastic-run.err", "wb") as errors:  # not among what elasticctl says
        launcher = subprocess.Popen(
            [*command, *flags, str(script)], env=env, stdout=subprocess.DEVNULL, stderr=errors
        )
    wait_until(
        lambda: (job_folder.find_newest(base) or base).joinpath("master.json").exists(), launcher
    )
    return Running(launcher=launcher, base=base, gate=gate, environ=env)


def wait_until(true: Callable[[], bool], launcher: subprocess.Popen[bytes]) -> None:
    """Look again whenever a moment has passed without the launcher's end."""
    for _ in range(DEADLINE * 20):
        if true():
            return
        try:
            raise AssertionError(f"elastic-run ended with {launcher.wait(0.05)}")
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"still not so after {DEADLINE} s")


def end(job: Running) -> None:
    if job.launcher.poll() is None:
        job.launcher.send_signal(signal.SIGTERM)
        try:
            job.launcher.wait(20)
        except subprocess.TimeoutExpired:
            job.launcher.kill()
            job.launcher.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A job whose ranks have finished step 100 in round 1, and wait."""
    base = tmp_path_factory.mktemp("ctl") / "state"
    running = start(base, "--state-dir", str(base), "--tee", "3", "--max-restarts", "1")
    try:
        running.follow(lambda line: "first step" in line)
        wait_until(running.is_waiting, running.launcher)  # what comes behind the step is told later
        yield running
    finally:
        end(running)


# --- a job that runs -----------------------------------------------------------------------------


def test_status_of_a_running_job(job: Running, ask: Ask) -> None:
    answer = ask("--dir", job.base, "status")
    assert answer.code == 0, answer.err
    head, line, _, reason, _, nodes, node = answer.lines
    assert columns(head) == JOB_COLUMNS
    assert columns(line)[:6] == [job.folder.name, "running", "1", "2", "100", "0"]
    assert reason == "round 1 finished its first step (step 100)"
    assert columns(nodes) == NODE_COLUMNS
    assert columns(node)[1:] == ["training", "0-1", "100", "waiting", "spawner", "127.0.0.1"]


def test_status_as_json_and_by_address(job: Running, ask: Ask) -> None:
    answer = ask("--master", job.note.address, "status", "-o", "json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["live"]
    assert (found["phase"], found["round"], found["world_size"]) == ("running", 1, 2)
    assert [rank["rank"] for rank in found["nodes"][0]["ranks"]] == [0, 1]
    assert 0 < found["goodput"] <= 1


def test_events_of_a_running_job(job: Running, ask: Ask) -> None:
    answer = ask("--dir", job.folder, "events")
    assert columns(answer.lines[0]) == ["AGE", "KIND", "REASON"]
    found = ask("--dir", job.folder, "-o", "json", "events").documents
    assert [event["kind"] for event in found[:2]] == ["MasterStarted", "Attached"]
    assert [event["sequence"] for event in found] == sorted({e["sequence"] for e in found})
    assert set(found[0]) == {"sequence", "time", "job_time", "kind", "reason", "detail"}


def test_why_of_a_job_of_which_no_round_has_ended(job: Running, ask: Ask) -> None:
    assert ask("--dir", job.folder, "why").out == commands.NONE_ENDED + "\n"
    answer = ask("--dir", job.folder, "why", "--round", "7")
    assert answer.code == 1
    assert "no end of round 7" in answer.err
    answer = ask("--master", job.note.address, "why")
    assert answer.code == 1
    assert "(--dir)" in answer.err


@pytest.mark.parametrize("tail", [1, 3, 101, 5000])
@pytest.mark.parametrize("by", ["folder", "master"])
def test_logs(job: Running, ask: Ask, by: str, tail: int) -> None:
    where = ("--dir", job.base) if by == "folder" else ("--master", job.note.address)
    whole = [f"rank 1 step {n}" for n in range(1, 101)] + ["end of rank 1 in round 1"]
    assert ask(*where, "logs", "--rank", "1").lines == whole
    assert ask(*where, "logs", "--rank", "1", "--tail", str(tail)).lines == whole[-tail:]
    assert ask(*where, "logs", "--stream", "stderr", "--attempt", "0").out == "a word on stderr\n"
    assert ask(*where, "logs", "--tail", "1", "-o", "json").documents == [
        {"rank": 0, "stream": "stdout", "line": "end of rank 0 in round 1"}
    ]


@pytest.mark.parametrize("by", ["folder", "master"])
def test_logs_that_are_not_there(job: Running, ask: Ask, by: str) -> None:
    where = ("--dir", job.base) if by == "folder" else ("--master", job.note.address)
    answer = ask(*where, "logs", "--rank", "7")
    assert (answer.code, answer.err) == (
        1, "elasticctl: there is no rank 7: the world has 0 to 1\n",
    )  # fmt: skip
    answer = ask(*where, "logs", "--attempt", "4")
    assert (answer.code, answer.err) == (
        1, "elasticctl: there is no attempt 4 yet: the newest is 0\n",
    )  # fmt: skip


def test_a_node_that_is_not_there(job: Running, ask: Ask) -> None:
    answer = ask("--dir", job.base, "drain", "nobody")
    assert answer.code == 1
    assert "there is no node nobody: `elasticctl status`" in answer.err


def test_a_token_that_nobody_asks_for(
    job: Running, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_JOB_TOKEN", "needless")
    assert ask("--dir", job.base, "status").code == 0


# --- what is no job ------------------------------------------------------------------------------


def test_no_job(ask: Ask, tmp_path: Path) -> None:
    answer = ask("--dir", tmp_path, "status")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert f"there is no job in {tmp_path}" in answer.err


def test_dead_address(ask: Ask) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        answer = ask("--master", f"127.0.0.1:{holder.getsockname()[1]}", "status")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert "no master answers" in answer.err


def test_unknown_host(ask: Ask) -> None:
    answer = ask("--master", "nowhere.invalid:29400", "status")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert "the host of nowhere.invalid:29400 is not found" in answer.err


def test_foreign_server(ask: Ask) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        answer = ask("--master", f"127.0.0.1:{server.server_port}", "status")
        server.shutdown()
        thread.join()
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert "is no master that we understand" in answer.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("whistle",),
            (
                "there is no verb 'whistle': write one of "
                "ckpt, data, delete, drain, events, generate, hf, logs, ls, operator, probe, restart, resume, scale, "
                "status, submit, suspend, why"
            ),
        ),
        (("--master", "host", "status"), "write HOST:PORT"),
        (("--dir", "x", "status", "--master", "h:1"), "both say which job"),
        (("--dir", "", "drain"), "--dir is empty"),
        (("drain", "--master", ""), "--master is empty"),
        (("--tls-ca", "x", "status"), "go together"),
        (("status", "--loudly"), "unrecognized arguments: --loudly"),
        (("logs", "--tail", "-1"), "--tail"),
        ((), "VERB"),
    ],
)
def test_usage(ask: Ask, args: Sequence[str], said: str) -> None:
    answer = ask(*args)
    assert answer.code == 2
    assert said in answer.err


def test_help_needs_no_job(ask: Ask) -> None:
    answer = ask("--help")
    assert answer.code == 0
    assert "  logs       What a rank wrote to its log files" in answer.out
    assert "exit code 1 if something is faulty." in answer.out  # the last line of a verb's text
    assert "--follow" in ask("logs", "--help").out


def test_uninstalled(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctl, "entry_points", lambda group: ())
    answer = ask("status")
    assert answer.code == 1
    assert "run `pip install -e .`" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.9, "59s"), (60, "1m"), (252, "4m12s"), (11_100, "3h5m"), (187_200, "2d4h")],
)
def test_age(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_tls(ask: Ask, tmp_path: Path) -> None:
    """The status of a master that shows a certificate, and wants to see one."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(str(files["ca"]))
    issued.private_key_pem.write_to_path(str(files["key"]))
    issued.cert_chain_pems[0].write_to_path(str(files["cert"]))
    flags = [text for name, path in files.items() for text in (f"--tls-{name}", str(path))]
    base = tmp_path / "state"
    job = start(base, "--state-dir", str(base), *flags)
    try:
        answer = ask("--dir", base, *flags, "status")
        assert answer.code == 0, answer.err
        answer = ask("--dir", base, "status")
        assert answer.code == 1
        assert "--tls-cert" in answer.err
    finally:
        end(job)


# --- a life ---------------------------------------------------------------------------------------


def test_a_life(tmp_path: Path, ask: Ask) -> None:
    """Master killed, ranks restarted by hand, over: followed all the way, then read from the folder.

    The job keeps to the default folder and wants a token.
    """
    base = tmp_path / "tmp" / f"elastic-{os.getuid()}"
    base.parent.mkdir()
    job = start(base, "--redirects", "1", TMPDIR=str(base.parent), ELASTIC_JOB_TOKEN="open sesame")
    try:
        with contextlib.ExitStack() as stack:
            live(job, ask, tmp_path / "copy", stack)
    finally:
        end(job)
    of_a_folder(job.folder, ask)
    of_a_killed_one(tmp_path / "copy", ask)


def live(job: Running, ask: Ask, copy: Path, stack: contextlib.ExitStack) -> None:
    def follow(*args: str) -> Follower:
        return stack.enter_context(contextlib.closing(Follower(job, *args)))

    token = job.base / "token"
    token.write_text("open sesame\n")
    by = ("--token-file", token, "--dir", job.base)
    events = follow("events", "--follow")
    events.until("first step (step 100)")
    log = follow("logs", "--follow", "--tail", "1")
    log.until("end of rank 0 in round 1")
    remote = follow("--master", job.note.address, "logs", "-f", "--tail", "1")
    remote.until("end of rank 0 in round 1")
    wants_token(job, ask)

    os.kill(job.note.pid, signal.SIGKILL)
    events.until("master is back in epoch 2")
    assert remote.end() == 0
    answer = ask(*by, "restart", "--reason", "because I say so")
    assert answer.code == 0, answer.err
    assert answer.out.startswith(f"{job.folder.name}: because I say so; ")
    events.until("round 2 finished its first step")
    log.until("end of rank 0 in round 2")
    assert columns(ask(*by, "status").lines[1])[1:6] == ["running", "2", "2", "100", "1"]
    answer = ask(*by, "logs", "--stream", "stderr")
    assert "stderr of rank 0 went to the console" in answer.err

    shutil.copytree(job.folder, copy)
    assert job.finish() == 0
    events.until("its node finished")
    assert events.end() == 0
    assert log.end() == 0


class Follower:
    """An `elasticctl` that follows something, and finds the job as a user without flags does."""

    def __init__(self, job: Running, *args: str) -> None:
        self._run = subprocess.Popen(
            elasticctl(*args),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=job.environ,
        )
        self._watchdog = threading.Timer(DEADLINE, self._run.kill)
        self._watchdog.start()

    def until(self, text: str) -> None:
        assert self._run.stdout is not None
        assert self._run.stderr is not None
        for line in self._run.stdout:
            if text in line:
                return
        raise AssertionError(f"ended before {text!r}: {self._run.stderr.read()}")

    def end(self) -> int:
        return self._run.wait(DEADLINE)

    def close(self) -> None:
        self._watchdog.cancel()
        with self._run:
            self._run.kill()


def wants_token(job: Running, ask: Ask) -> None:
    answer = ask("--dir", job.folder, "status")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert "wants the job's token: set ELASTIC_JOB_TOKEN, or give --token-file FILE" in answer.err
    wrong = job.base / "wrong"
    wrong.write_text("sesame")
    answer = ask("--master", job.note.address, "--token-file", wrong, "events")
    assert (answer.code, len(answer.err.splitlines())) == (1, 1)
    assert "does not take this token" in answer.err


def of_a_folder(folder: Path, ask: Ask) -> None:
    """A job that is over answers from its folder, at once and with no token."""
    answer = ask("--dir", folder, "status")
    assert (answer.code, answer.err) == (0, "")
    assert columns(answer.lines[1])[1:6] == ["succeeded", "2", "2", "100", "1"]
    assert columns(answer.lines[-1])[1:3] == ["finished", "0-1"]
    found = json.loads(ask("--dir", folder, "status", "-o", "json").out)
    assert not found["live"]
    assert found["restarts_by_cause"] == {"asked for": 1}
    reasons = [event["reason"] for event in ask("--dir", folder, "events", "-o", "json").documents]
    assert any(reason.startswith("because I say so") for reason in reasons)
    told = ask("--dir", folder, "why", "-o", "json")
    found = json.loads(told.out)
    assert (found["round"], found["failed"], found["label"]) == (2, False, None), told.out
    followed = ask("--dir", folder, "events", "--follow")
    assert columns(followed.lines[0]) == ["TIME", "KIND", "REASON"]
    assert ask("--dir", folder, "logs", "-f").lines[-1] == "end of rank 0 in round 2"
    assert ask("--dir", folder, "logs", "--attempt", "0").lines[-1] == "end of rank 0 in round 1"
    for args, said in (
        (("--rank", "9"), "attempt 1 had no rank 9 here: there is 0 to 1"),
        (("--attempt", "5"), "there is no attempt 5 here: there are 0, 1"),
        (("--stream", "stderr"), "start the job with --tee 3"),
    ):
        answer = ask("--dir", folder, "logs", *args)
        assert answer.code == 1
        assert said in answer.err
    answer = ask("--dir", folder, "restart")
    assert answer.code == 1
    assert "has no master: it is over" in answer.err


def of_a_killed_one(folder: Path, ask: Ask) -> None:
    """As its folder was while it ran; nobody listens where its master did."""
    answer = ask("--dir", folder, "status")
    assert answer.code == 0
    assert "no master answers" in answer.err
    assert columns(answer.lines[1])[1:6] == ["dead", "2", "2", "100", "1"]
    assert "the same command line goes on with it" in answer.out
    assert columns(answer.lines[-1])[1:3] == ["stopped", "0-1"]

"""Mistakes of people: one clear line that says what to do, the right exit code, no traceback."""

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tests.e2e.harness import SCRIPT, Job
from tests.e2e.harness.disk import fill

USAGE = 2


def _tls(path: str) -> tuple[str, ...]:
    return ("--tls-cert", path, "--tls-key", path, "--tls-ca", path)


MISTAKES: list[tuple[str, Sequence[str], int, str]] = [
    ("unknown flag", ("--bogus",), USAGE, "unrecognized arguments: --bogus"),
    ("no nodes", ("--nnodes", "0"), USAGE, "a job needs at least 1 node"),
    ("nodes upside down", ("--nnodes", "3:2"), USAGE, "the least, 3, is above the most, 2"),
    ("nodes in words", ("--nnodes", "two"), USAGE, "write a number of nodes, or MIN:MAX"),
    ("no ranks", ("--nproc-per-node", "0"), USAGE, "write a number from 1 up, or gpu"),
    ("too many ranks", ("--nproc-per-node", "5000"), USAGE, "a node has 4096 at most"),
    (
        "a name that is no text",
        ("--node-id", "a\udcff"),
        USAGE,
        "--node-id 'a\\udcff': it is no text",
    ),
    ("a label that is no text", ("--label", "a=\udcff"), USAGE, "--label '\\udcff': it is no text"),
    ("a name without end", ("--node-id", "n" * 300), USAGE, "has 256 characters at most"),
    ("no such device", ("--nproc-per-node", "tpus"), USAGE, "--nproc-per-node"),
    ("a unit that does not fit", ("--nnodes", "3:3", "--node-unit", "2"), USAGE, "--node-unit 2"),
    ("a unit that is never met", ("--rank-unit", "7"), USAGE, "--rank-unit 7: 1 node has 2 ranks"),
    ("no such folder", ("--report", "/proc/x/report"), USAGE, "--report /proc/x/report: No such"),
    ("an endpoint without port", ("--rdzv-endpoint", "127.0.0.1:x"), USAGE, "port must be"),
    ("an address not here", ("--rdzv-endpoint", "192.0.2.1:29400"), USAGE, "192.0.2.1:29400"),
    ("an unknown backend", ("--rdzv-backend", "zoo"), USAGE, "use static or c10d"),
    ("half of TLS", ("--tls-cert", "x"), USAGE, "give all or none"),
    ("no TLS file", _tls("/nowhere/cert"), USAGE, "--tls-cert /nowhere/cert: No such file"),
    ("a TLS file of something else", _tls(str(SCRIPT)), USAGE, "no pair of a certificate and"),
    ("a token file without end", ("--token-file", "/dev/zero"), USAGE, "holds more than 4096"),
    ("no token", ("--require-token",), USAGE, "set ELASTIC_JOB_TOKEN, or --token-file FILE"),
    ("a token file that is not", ("--token-file", "/nowhere/t"), USAGE, "/nowhere/t"),
    ("a folder that is none", ("--log-dir", "/dev/null/x"), USAGE, "cannot make /dev/null/x"),
    ("ports upside down", ("--port-range", "300-200"), USAGE, "is not a range of ports"),
]


@pytest.mark.parametrize(
    ("flags", "code", "words"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_command_line_that_makes_no_sense(
    job: Job, flags: Sequence[str], code: int, words: str
) -> None:
    node = job.start(*flags)
    job.ends(code)
    said = node.said()
    assert words in said.splitlines()[-1], said
    assert "Traceback" not in said


def test_an_empty_script_name(job: Job) -> None:
    """As a shell makes it of a variable that is unset."""
    node = job.start(entry=("",))
    job.ends(USAGE)
    assert "the script's name is empty" in node.said(), job.dump()


SCRIPTS: list[tuple[str, Sequence[str], int, str]] = [
    ("missing script", ("nowhere.py",), 1, "can't open file"),
    ("missing module", ("-m", "no.such.module"), 1, "no.such.module"),
    ("missing program", ("--no-python", "./nowhere"), 1, "cannot start ./nowhere"),
    ("not executable", ("--no-python", "/etc/hostname"), 1, "cannot start /etc/hostname"),
    ("cannot be imported", ("broken.py",), 1, "ModuleNotFoundError: No module named 'nowhere'"),
    ("no Python", ("syntax.py",), 1, "SyntaxError"),
    ("a folder", ("empty",), 1, "find '__main__' module"),
]


@pytest.mark.parametrize(
    ("entry", "code", "words"), [s[1:] for s in SCRIPTS], ids=[s[0] for s in SCRIPTS]
)
def test_a_script_that_cannot_run(job: Job, entry: Sequence[str], code: int, words: str) -> None:
    (job.folder / "broken.py").write_text("import nowhere\n")
    (job.folder / "syntax.py").write_text("def f(:\n")
    (job.folder / "empty").mkdir()
    node = job.start(entry=entry, log_level="WARNING")
    job.ends(code)
    said = node.said()
    assert words in said, said
    ours = [line for line in said.splitlines() if line.startswith("elastic-run: ")]
    assert len(ours) == 1, said  # and it names the rank
    assert "rank 0 on node0" in ours[0] or "rank 1 on node0" in ours[0], said
    missing = f"there is no {job.folder / 'nowhere.py'} on this node"
    assert (missing in ours[0]) is (entry[0] == "nowhere.py"), said


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_launcher_without_streams(job: Job, closed: str) -> None:
    prefix = ("sh", "-c", f'exec "$@" {closed}', "sh")
    job.start(prefix=prefix)
    job.wait_for_steps(2)
    job.finish()
    job.start("--bogus", prefix=prefix)
    job.ends(0, USAGE)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_port_in_use(job: Job, nodes: str) -> None:
    """By a program that is no launcher; with several nodes a launcher would be joined."""
    with socket.create_server((job.address, job.port)):
        node = job.start(nodes=nodes)
        job.ends(USAGE)
    assert "has the port; choose another one" in node.said().splitlines()[-1], node.said()


def test_no_master_and_a_foreign_one(job: Job) -> None:
    joins = ("--rdzv-conf", "is_host=false", "--join-timeout", "2")
    lonely = job.start(*joins, nodes="2")
    assert lonely.exit_code() == 1
    assert "no master answers at" in lonely.said().splitlines()[-1], lonely.said()
    with socket.create_server((job.address, job.port)):  # takes connections, and says nothing
        mute = job.start(*joins, nodes="2")
        assert mute.exit_code() == 1
        assert "no master answers at" in mute.said().splitlines()[-1], mute.said()
    job.start(nodes="1:2")
    job.wait_for_steps(2)
    foreign = job.start(*joins, "--rdzv-id", "another", nodes="1:2")
    assert foreign.exit_code() == 1
    assert "this master runs job 'job', not 'another'" in foreign.said(), foreign.said()
    job.finish()
    job.ends(1, 1, 0, 1)


def test_a_server_of_another_kind(job: Job) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_insecure_port(f"{job.address}:{job.port}")
    server.start()
    node = job.start("--rdzv-conf", "is_host=false", nodes="2")
    job.ends(1)
    server.stop(None).wait()
    assert "is no master of elastic-run (Method not found!)" in node.said().splitlines()[-1]


def test_a_token_that_cannot_be_sent(job: Job) -> None:
    node = job.start(environ={"ELASTIC_JOB_TOKEN": "schlüssel"})
    job.ends(USAGE)
    assert "token" in node.said().splitlines()[-1], node.said()


def test_two_launchers_with_the_journal_of_one(job: Job) -> None:
    """The same job started twice on one host, on two ports: the second says so, the first goes on."""
    job.start()
    number = job.wait_for_steps(2)
    second = job.start("--rdzv-endpoint", f"{job.address}:29401")
    assert second.exit_code() == 1, job.dump()
    ours = [line for line in second.said().splitlines() if "no job token" not in line]
    assert len(ours) == 1, second.said()
    assert "another master writes the journal" in ours[0]
    job.wait_for_more_steps(number, 2)
    job.finish()
    job.ends(0, 1)


def test_a_journal_whose_path_is_too_long(job: Job) -> None:
    folder = job.folder / "/".join(["x" * 100] * 5)
    node = job.start("--log-dir", str(folder))
    job.ends(USAGE)
    assert "give a shorter --state-dir or --log-dir" in node.said().splitlines()[-1], node.said()


def test_a_report_takes_the_place_of_nothing_but_a_file(job: Job) -> None:
    """A device, say: /dev/null was gone from the machine. Nor of a link: of what it leads to."""
    os.mkfifo(job.folder / "pipe")
    link = job.folder / "link"
    link.symlink_to("pipe")
    for name in ("pipe", "link", "."):
        node = job.start("--report", str(job.folder / name))
        assert node.exit_code() == USAGE, job.dump()
    assert "it is no regular file" in job.nodes[1].said().splitlines()[-1], job.dump()
    link.unlink()
    link.symlink_to("report")
    job.finish()
    job.start("--report", str(link))
    job.ends(USAGE, USAGE, USAGE, 0)
    assert link.is_symlink()
    assert (job.folder / "report").is_file()


def test_a_report_that_cannot_be_written_after_all(job: Job) -> None:
    """Nothing of it is left, and the job's end is what it was."""
    report = job.folder / "report" / "job.json"
    report.parent.mkdir()
    node = job.start("--report", str(report))
    job.wait_for_steps(2)
    report.mkdir()
    job.finish()
    job.ends(0)
    assert f"cannot write the report {report}" in node.said(), node.said()
    assert list(report.parent.iterdir()) == [report]


def test_no_shared_memory_is_needed(job: Job, small_disk: Path) -> None:
    """/dev/shm is full: nothing of ours lies there."""
    fill(small_disk)
    mount = ("unshare", "-m", "sh", "-c", f'mount --bind {small_disk} /dev/shm && exec "$@"', "sh")
    command = (sys.executable, "-m", "elastic.run", "--nproc-per-node", "2", "--standalone")
    logs = ("--log-dir", str(job.folder / "logs"))
    job.launch("node0", (*mount, *command, *logs, str(SCRIPT), str(job.folder)), {})
    job.wait_for_steps(2)
    job.finish()
    job.ends(0)


@pytest.mark.parametrize("form", [(), ("--rdzv-backend", "static", "--node-rank", "1")])
def test_a_name_that_nobody_has(job: Job, form: Sequence[str]) -> None:
    """Waited for as long as for a master: it may be a pod's that is still to come."""
    name = f"{secrets.token_hex(8)}.invalid"
    node = job.start(*form, "--rdzv-endpoint", f"{name}:29400", "--join-timeout", "1", nodes="2")
    job.ends(1)
    assert f"no address for {name} within 1 s" in node.said().splitlines()[-1], node.said()

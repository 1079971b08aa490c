"""What may happen to a rank, and to what it started."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.harness import Job, processes
from tests.e2e.harness.tracer import holding

ENDINGS = ("kill", "segv", "raise", "exit3")


@pytest.mark.parametrize("when", ["start", "step", "end"])
@pytest.mark.parametrize("how", ENDINGS)
def test_a_rank_that_fails_is_started_again_with_the_others(job: Job, how: str, when: str) -> None:
    restarts = "0" if how == "kill" else "1"  # a SIGKILL is nobody's fault
    job.start("--max-restarts", restarts, script=("--fault", f"{when}:{how}:1:1"))
    if when == "end":
        job.wait_for_steps(2)
        job.finish()
    else:
        job.wait_for_steps(2, after=1)
        job.finish()
    job.ends(0)
    assert len(job.told("fault")) == 1, job.dump()
    assert {line.rank for line in job.told("end", round=2)} == {0, 1}, job.dump()
    assert job.round() == 2, job.dump()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("segv", "rank 1 on node0 was ended by SIGSEGV"),
        ("raise", "rank 1 on node0 raised ValueError: asked to fail at step"),
        ("exit3", "rank 1 on node0 exited with 3"),
    ],
)
def test_without_restarts_a_rank_that_fails_ends_the_job(job: Job, how: str, words: str) -> None:
    job.start(script=("--fault", f"step:{how}:1:1", "--child"), log_level="WARNING")
    job.ends(1)
    assert words in job.nodes[0].said(), job.dump()
    assert words in job.report()["result"]["reason"]
    assert job.round() == 1, job.dump()


def test_ranks_that_have_less_to_do_than_others_end_the_job_and_no_network_is_blamed(
    job: Job,
) -> None:
    """As torchrun would; twice it may have been the very end of the work."""
    job.start(script=("--torch", "--fault", "step:exit0:1:*"))
    job.ends(1)
    assert job.round() == 3, job.dump()
    said = job.report()["result"]["reason"]
    assert said.startswith("rank 1 had ended, with 0, while others went on; "), said
    told = job.ctl("why")
    assert "script error (likely). It began with rank 1 on node0" in told, told


TIMED = """
import json, os, subprocess, sys, time

def tell(pid, end):
    told = {"pid": pid, "scope_id": "step", "expiration_time": end, "signal": 9}
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "wb", buffering=0) as pipe:
        pipe.write(json.dumps(told).encode() + b"\\n")

if sys.argv[1:] == ["child"]:
    tell(os.getpid(), time.time() + 0.1)
    time.sleep(600)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        with open(os.environ["TORCHELASTIC_TIMER_FILE"], "wb", buffering=0) as pipe:
            pipe.write(b"\\xff{[" * 50_000 + b"\\n")
        for pid in (1, os.getppid(), os.getpgid(os.getppid()), int(sys.argv[1])):
            tell(pid, time.time())
        subprocess.run([sys.executable, __file__, "child"])
    time.sleep(600)
"""


def test_a_timer_that_expires_ends_a_rank_and_nobody_else(job: Job) -> None:
    """Whatever is written about whom; held by a process that a rank started, it is the rank's."""
    script = job.folder / "timed.py"
    script.write_text(TIMED)
    bystander = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        entry = (str(script), str(bystander.pid))
        environ = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
        job.start("--max-restarts", "1", environ=environ, entry=entry)
        job.ends(0)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert job.report()["restarts_by_cause"] == {"script error": 1}, job.dump()
    assert "rank 0 on node0 was ended by SIGKILL: its timer 'step' expired" in job.dump()
    assert "is started again" not in job.nodes[0].said(), job.dump()
    assert not list(job.folder.glob("elastic-timers-*"))


def test_all_ranks_at_once(job: Job) -> None:
    job.start(nproc=4)
    first = job.wait_for_steps(4)
    processes.kill(*(job.rank(first, rank) for rank in range(4)))
    job.wait_for_steps(4, after=first)
    job.finish()
    job.ends(0)
    assert job.round() == 2, job.dump()


THREADED = """
import os, pathlib, sys, threading, time
folder = pathlib.Path(sys.argv[1])
if not (folder / "again").exists():
    import elastic.session
    elastic.session.step(1)
    if os.fork() == 0:
        time.sleep(1e6)
    thread = threading.Thread(target=time.sleep, args=(1e6,), daemon=True)
    thread.start()
    note = folder / f"note-{os.environ['RANK']}"
    note.with_suffix(".new").write_text(f"{os.getpid()} {thread.native_id}")
    note.with_suffix(".new").rename(note)
    time.sleep(1e6)
"""


def test_a_killed_rank_is_heard_of_before_it_can_be_reaped(job: Job) -> None:
    """The others are ended meanwhile. It has a child, as loaders' workers are, which lives on."""
    script = job.folder / "threaded.py"
    script.write_text(THREADED)
    node = job.start(entry=(str(script), str(job.folder)))
    ranks = [job.folder / f"note-{rank}" for rank in range(2)]
    job.wait_for("both ranks", lambda: all(note.exists() for note in ranks) or None)
    (other, _), (pid, thread) = (map(int, note.read_text().split()) for note in ranks)
    with holding(thread):
        (job.folder / "again").touch()
        os.kill(pid, signal.SIGKILL)
        job.wait_for("the other's end", lambda: not processes.alive(other) or None)
        assert Path(f"/proc/{pid}").exists(), job.dump()
    job.ends(0)
    assert "rank 1 on node0 was ended by SIGKILL; round 2" in node.said(), job.dump()


def test_what_a_rank_leaves_behind_ends_with_its_round(job: Job) -> None:
    job.start(script=("--child",))
    first = job.wait_for_steps(2)
    children = [line.fields["child"] for line in job.told("child", round=first)]
    assert len(children) == 2
    processes.kill(job.rank(first, 0))
    second = job.wait_for_steps(2, after=first)
    assert not any(processes.alive(pid) for pid in children), job.dump()
    children = [line.fields["child"] for line in job.told("child", round=second)]
    assert all(processes.alive(pid) for pid in children), job.dump()
    job.finish()
    job.ends(0)


def test_a_second_fault_while_the_first_is_dealt_with(job: Job) -> None:
    node = job.start(script=("--child",))
    number = job.wait_for_steps(2)
    for fault in range(4):
        processes.kill(job.rank(number, fault % 2))
        job.wait_for("a rank of the next round", lambda: job.round() > number or None)  # noqa: B023
        newest = job.told("start")[-1]
        if fault < 3:
            processes.kill(newest.pid)
        else:
            processes.kill(newest.pid, node.agent())
        number = job.wait_for_steps(2, after=newest.round)
    job.finish()
    job.ends(0)


def test_what_ranks_leave_behind_and_has_ended_is_reaped_while_they_run(job: Job) -> None:
    """Else a script that starts something in the background at each step fills the process table."""
    node = job.start(script=("--stray",))
    number = job.wait_for_steps(2)
    agent = node.agent()
    strays = {line.fields["stray"] for line in job.told("stray")}
    assert len(strays) == 2, job.dump()
    job.wait_for("their end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in strays))
    assert job.round() == number
    assert processes.alive(agent)
    job.finish()
    job.ends(0)


def test_the_working_directory_goes_away(job: Job, tmp_path: Path) -> None:
    """The reason names it, and no store is blamed."""
    gone = job.folder / "gone"
    gone.mkdir()
    node = job.start(prefix=("env", "-C", str(gone)))
    number = job.wait_for_steps(2)
    gone.rmdir()
    processes.kill(job.rank(number, 0))
    job.ends(1)
    assert f"the working directory {gone} is gone" in job.report()["result"]["reason"], job.dump()
    assert "store" not in node.said(), job.dump()


# --- signals ---


def test_a_signal_to_the_launcher_is_the_ranks_at_once_and_they_have_time(job: Job) -> None:
    node = job.start("--shutdown-timeout", "50", script=("--on-term", "work", "--child"))
    job.wait_for_steps(2)
    node.signal(signal.SIGTERM)
    job.ends(1)
    assert {line.rank for line in job.told("term")} == {0, 1}, job.dump()
    assert {line.rank for line in job.told("saved")} == {0, 1}, job.dump()
    assert job.round() == 1, job.dump()
    assert job.report()["result"]["outcome"] == "stopped", "the same command goes on with it"


@pytest.mark.parametrize(
    ("end", "code", "how", "words"),
    [
        ("signal", 1, "raise", "OSError: cannot save"),
        ("drain", 213, "raise", "OSError: cannot save"),
        ("signal", 1, "alarm", f"signal {signal.SIGRTMAX - 1}"),
    ],
)
def test_a_rank_that_cannot_save_says_so(
    job: Job, end: str, code: int, how: str, words: str
) -> None:
    node = job.start(script=("--on-term", how), log_level="WARNING")
    job.wait_for_steps(2)
    if end == "drain":
        job.ctl("drain")
    else:
        node.signal(signal.SIGTERM)
    job.ends(code)
    for rank in range(2):
        line = f"rank {rank} failed while it stopped: {words}\n"
        assert node.said().count(line) == 1, job.dump()


def test_a_signal_during_a_drain_leaves_its_result(job: Job) -> None:
    """Slurm warns, and then ends the step: it is requeued if its launcher says that it was drained."""
    node = job.start("--drain-timeout", "100", script=("--on-term", "hold"))
    number = job.wait_for_steps(2)
    job.ctl("drain")
    job.wait_for("the ranks' signal", lambda: len(job.told("term", round=number)) == 2 or None)
    node.signal(signal.SIGTERM)
    job.wait_for(
        "the launcher's word", lambda: "SIGTERM: ending, with up to" in node.said() or None
    )
    job.finish()
    job.ends(213)
    assert {line.rank for line in job.told("saved")} == {0, 1}, job.dump()


def test_a_rank_that_ignores_the_signal_is_killed_once_its_time_is_over(job: Job) -> None:
    node = job.start("--shutdown-timeout", "1", script=("--on-term", "ignore"))
    job.wait_for_steps(2)
    node.signal(signal.SIGINT)
    node.signal(signal.SIGTERM)
    job.ends(1)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_kills_the_ranks_at_once(job: Job, first: int) -> None:
    """Only an interrupt, and only the second: Slurm and systemd send others twice or in turn."""
    node = job.start("--shutdown-timeout", "100", script=("--on-term", "ignore"))
    number = job.wait_for_steps(2)
    node.signal(first)
    job.wait_for("the signal", lambda: len(job.told("term")) == 2 or None)
    assert "ending, with up to 100 s for the ranks" in node.said(), job.dump()
    assert ("^C again" in node.said()) is (first == signal.SIGINT), job.dump()
    node.signal(signal.SIGTERM)
    if first == signal.SIGTERM:
        node.signal(signal.SIGINT)
    job.wait_for_more_steps(number, 2, count=30)
    node.signal(signal.SIGINT)
    job.ends(1)


def test_a_signal_before_any_rank_runs(job: Job) -> None:
    node = job.start("--rdzv-conf", "is_host=false", "--join-timeout", "100", nodes="2")
    job.wait_for("it to wait for a master", lambda: "waiting for a master" in node.said())
    node.signal(signal.SIGTERM)
    job.ends(128 + signal.SIGTERM)


@pytest.mark.parametrize("part", ["agent", "master"])
def test_a_signal_while_a_part_is_started_again_ends_the_job(job: Job, part: str) -> None:
    node = job.start()
    job.wait_for_steps(2)
    processes.kill(node.agent() if part == "agent" else node.master())
    job.wait_for("its next life", lambda: f"the {part} died" in node.said() or None)
    node.signal(signal.SIGTERM)
    job.ends(1)
    assert node.said().count("died (") == 1, job.dump()
    assert job.report()["result"]["outcome"] == "stopped", job.dump()


def test_no_process_inherits_a_blocked_signal(job: Job) -> None:
    node = job.start(script=("--torch",))
    number = job.wait_for_steps(2)
    processes.kill(node.agent())  # so that all of it is started a second time
    job.wait_for_steps(2, after=number)
    node.part("elastic-standby")
    for process in job.left():
        assert blocked(process.pid) == 0, (process, job.dump())
    job.finish()
    job.ends(0)


def blocked(pid: int) -> int:
    """Mask of signals that the process's main thread has blocked; 0 where it ended meanwhile."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))


def test_many_ranks_fit_though_each_may_open_few_files(job: Job, tmp_path: Path) -> None:
    """The agent holds several descriptors for each; a rank has what the shell allows."""
    script = tmp_path / "limit.py"
    script.write_text(
        "import os, resource\n"
        "print('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0], 'of', os.environ['RANK'])\n"
    )
    shell = ("sh", "-c", 'ulimit -Sn 512 && exec "$@"', "sh")
    node = job.start("--tee", "3", nproc=64, prefix=shell, entry=(str(script),))
    job.ends(0)
    found = {path.read_text() for path in tmp_path.rglob("attempt_0/*/stdout.log")}
    assert found == {f"limit 512 of {rank}\n" for rank in range(64)}, job.dump()
    assert "goes to no file" not in node.said()

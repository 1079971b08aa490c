"""Ranks that hang in every way, in rounds of one job: each is named, and the job goes on."""

import platform
import re
import sys

import pytest

from tests.e2e.harness import FORK, ROOT, Job
from tests.e2e.harness.stuck import stuck_folder

SCRIPT = ROOT / "tests" / "e2e" / "harness" / "scripts" / "hangs.py"
STEP = 40
"""In which they hang."""


def start(
    job: Job,
    *hangs: str,
    seconds: float = 0.02,
    flags: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    fork: bool = True,
) -> None:
    """Two nodes of two ranks. fork: them from the first."""
    entry = (str(SCRIPT), str(job.folder), str(STEP), str(seconds), "cpu", *hangs)
    for _ in range(2):
        job.start(*(FORK,) * fork, *flags, nodes="2", nproc=2, entry=entry, prefix=prefix)


def named(job: Job, number: int) -> str:
    """Why round `number` ended."""
    return job.wait_for_event(f"round {number + 1}: 2 nodes")


def all_are_named(job: Job, hangs: tuple[str, ...]) -> None:
    """A round each, and the job comes to its end."""
    job.wait_for_steps(4, after=len(hangs), count=5)
    for number, (how, _, rank) in enumerate((hang.partition(":") for hang in hangs), 1):
        assert re.search(rf"rank {rank} on node\d (is stopped|does not go on|waits apart)", named(job, number)), (
            how, job.events(),
        )  # fmt: skip
    job.finish()
    job.ends(0)


def test_whoever_hangs_is_named_and_the_job_goes_on(job: Job) -> None:
    hangs = ("loop:1", "stop:3", "gil:2", "sleep-with-gil:0", "skip:1", "mismatch:3", "worker:2")
    start(job, *hangs, fork=False)
    all_are_named(job, hangs)
    written = (job.folder / "logs" / "job" / "hang-1.txt").read_text()
    assert "endless" in written, written
    assert written.count("\nrank ") == 4, written
    assert job.report()["restarts_by_cause"] == {"hang": len(hangs)}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="system calls by their numbers there")
def test_where_no_memory_may_be_read_they_tell_of_themselves(job: Job) -> None:
    hangs = ("stop:3", "loop:1", "gil:2", "skip:0", "worker:2")
    sandbox = (sys.executable, "-m", "tests.e2e.harness.sandbox")
    start(job, *hangs, prefix=sandbox)
    all_are_named(job, hangs)
    folder = job.folder / "logs" / "job"
    assert "endless" in (folder / "hang-2.txt").read_text()
    assert "keep_the_gil" in (folder / "hang-3.txt").read_text()


def test_who_does_not_send_and_who_wait_for_one_another(job: Job) -> None:
    """All wait, and none of them in another collective than the others."""
    start(job, "unsent:1", "cross:3")
    job.wait_for_steps(4, after=2, count=5)
    unsent, crossed = named(job, 1), named(job, 2)
    assert re.search(r"rank 1 on node\d waits apart: .*rank 0 receives number 1 from rank 1, which has sent 0", unsent), (
        job.events()
    )  # fmt: skip
    assert re.search(r"ranks 2-3 wait apart: .*rank 2 receives number 1 from rank 3, which has sent 0; rank 3 receives", crossed), (
        job.events()
    )  # fmt: skip
    assert "no step for" in unsent
    job.finish()
    job.ends(0)


def test_without_an_optimizer_there_is_a_last_resort(job: Job) -> None:
    """With a small floor, which makes it less patient; no step ever tells that the ranks go on."""
    hangs = ("by-hand-stop:3", "by-hand-skip:1")
    start(job, *hangs, "by-hand-nothing:0", flags=("--hang-floor", "0.1"))
    all_are_named(job, hangs)
    assert all(re.search(r"no move seen for \d+ s", named(job, number)) for number in (1, 2)), (
        job.events()
    )


@pytest.mark.soak
def test_who_sends_to_a_peer_that_never_reads_is_named_after_a_minute(job: Job) -> None:
    start(job, "clogged:2")
    assert re.search(r"rank 2 on node\d does not go on: .* in send\b", named(job, 1)), job.events()
    job.finish()
    job.ends(0)


@pytest.mark.soak
def test_a_disk_that_never_answers(job: Job) -> None:
    """The node with it leaves, since nothing ends the rank; the others go on."""
    with stuck_folder(job.folder / "stuck"):
        start(job, "disk:3", flags=("--nnodes", "1:2"))
        said = job.wait_for_event("does not go on")
        assert re.search(r"rank 3 on node\d does not go on: ", said), job.events()
        number = job.wait_for_steps(2, after=1, count=5)
    job.finish()
    assert number > 1
    job.wait_for("the launcher's end", lambda: job.nodes[0].process.poll() is not None or None)


def test_a_read_that_a_disk_never_answers(job: Job) -> None:
    """In state D, from which SIGKILL frees it: its node stays."""
    with stuck_folder(job.folder / "stuck"):
        start(job, "read:1")
        all_are_named(job, ("read:1",))


@pytest.mark.parametrize(
    "what",
    [
        *("late:1", "compiles:3", "alone:0", "saves:2"),
        *(pytest.param(what, marks=pytest.mark.soak) for what in ("sends:1", "uploads:3")),
    ],
)
def test_what_takes_long_for_a_reason_is_no_hang(job: Job, what: str) -> None:
    """A loader that comes back; a rank that evaluates while the others wait for it; one that writes a file; one
    that compiles in the midst of training; one that uploads, itself or by a child, for more than a minute."""
    start(job, what)
    number = job.wait_for_steps(4, count=STEP + 20)
    job.finish()
    job.ends(0)
    assert number == 1, job.events()
    assert any("looking at all" in node.said() for node in job.nodes), "it was suspected at all"

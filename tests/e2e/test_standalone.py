"""`Checkpointer` where nobody but `python` or `torchrun` started the script: a keeper process keeps what
ranks save, writes it, and ends by itself."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.proto import manifest
from tests.e2e.harness import DEADLINE, ROOT, Job, processes
from tests.e2e.harness.network import missing
from tests.e2e.harness.ports import free_port
from tests.e2e.test_checkpoints import SCRIPT, check
from tests.elastic.checkpoint.steps import flip

KEEPS = Path(__file__).parent / "harness" / "scripts" / "keeps.py"
FRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""torchrun's restarts hang or fail now and then where torch finds the store of the round before."""


ALONE = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""With all ports to itself: torchrun's ranks take one long after it has found it free, and nobody else may then."""


def python(job: Job, number: int, *script: str) -> None:
    """Plain python, the script's round of that number."""
    flags = ("--first-round", str(number), *script)
    job.launch(f"python{number}", (sys.executable, str(SCRIPT), str(job.folder), *flags), {})


def torchrun(job: Job, *flags: str, script: tuple[str, ...] = (), nproc: int = 2) -> None:
    name = f"torchrun{len(job.nodes)}"
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc))
    prefix = () if missing() or "--standalone" not in flags else ALONE
    job.launch(name, (*command, *flags, str(SCRIPT), str(job.folder), *script), FRESH, prefix)


def keepers(job: Job) -> list[int]:
    return [p.pid for p in job.left() if p.command.startswith("elastic-keeper")]


def gone(*pids: int) -> None:
    """Wait for their end."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([pidfd], [], [], DEADLINE)[0], f"process {pid} does not end"
        os.close(pidfd)


def ends(job: Job, *codes: int) -> None:
    """Launchers, and then by themselves the keepers."""
    assert tuple(node.exit_code() for node in job.nodes[-len(codes) :]) == codes, job.dump()
    gone(*keepers(job))
    job.assert_nothing_left()


def said_by(job: Job) -> str:
    return "\n".join(node.said() for node in job.nodes)


def on_storage(job: Job) -> list[int]:
    found = (job.folder / "checkpoint").glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def test_plain_python_writes_what_is_due_and_its_newest_and_goes_on_from_there(job: Job) -> None:
    python(job, 1, "--persist-every", "4")
    job.wait_for_steps(1, count=9)
    job.finish()
    ends(job, 0)
    last = job.told("step")[-1].fields["step"]
    assert on_storage(job) == sorted({*range(4, last + 1, 4), last})
    (job.folder / "finish").unlink()
    (job.folder / "last.1").unlink()
    python(job, 2)
    job.wait_for_steps(1, after=1, count=2)
    job.finish()
    ends(job, 0)
    assert job.told("loaded", round=2)[0].fields["step"] == last
    check(job, 2)
    assert not said_by(job).strip()


def test_a_damaged_step_is_named_with_the_one_to_load_in_its_place(job: Job) -> None:
    python(job, 1, "--own", "3000", "--persist-every", "4")
    job.wait_for_steps(1, count=9)
    job.finish()
    ends(job, 0)
    *_, before, last = on_storage(job)
    (shard,) = (job.folder / "checkpoint" / manifest.folder(last)).glob("shard-*")
    flip(shard, "own")
    python(job, 2, "--own", "3000")
    ends(job, 1)
    said = job.nodes[-1].said()
    what = f"{shard}: own is damaged, and there is no other copy of it"
    assert f"{what}; load(state, step={before}) loads the step on storage before it" in said


def test_a_python_that_is_ended_goes_on_from_its_last_step(job: Job) -> None:
    """Though the next begins at once, and though the signal goes to all of its group."""
    for life, number in enumerate((signal.SIGKILL, signal.SIGINT), 1):
        python(job, life)
        job.wait_for_steps(1, after=life - 1, count=3)
        os.killpg(job.nodes[-1].guardian, number)
        job.nodes[-1].process.wait()
    job.finish()
    python(job, 3)
    ends(job, 0)
    check(job, 3)


def test_torchrun_restarts_ranks_from_the_step_before_the_kill(job: Job) -> None:
    torchrun(job, "--standalone", "--max-restarts", "1", script=("--persist-every", "50"))
    job.wait_for_steps(2, count=4)
    job.kill(1, 1)
    job.wait_for_steps(2, after=1, count=3)
    job.finish()
    ends(job, 0)
    check(job, 2)
    last = min(line.fields["step"] for line in job.told("end"))
    assert on_storage(job)[-1] == last
    python(job, 3)  # at another world size
    ends(job, 0)
    check(job, 3)


@pytest.mark.soak
def test_nodes_of_torchrun(job: Job) -> None:
    """A keeper on each, rank 0's hears of all."""
    port = str(free_port())  # of every address of the host, which torch's store takes
    meeting = ("--nnodes", "2", "--master-addr", job.address, "--master-port", port)
    for life in (1, 2):
        for node in ("0", "1"):
            script = ("--persist-every", "5", "--first-round", str(life))
            torchrun(job, *meeting, "--node-rank", node, script=script, nproc=1)
        job.wait_for_steps(2, after=life - 1, count=7)
        assert len(keepers(job)) == 2
        if life == 1:
            for launcher in job.nodes:
                launcher.signal(signal.SIGTERM)
            ends(job, 1, 1)
    job.finish()
    ends(job, 0, 0)
    check(job, 2)


def test_a_helper_that_is_killed_is_missed_in_a_line(job: Job) -> None:
    torchrun(job, "--standalone")
    job.wait_for_steps(2, count=3)
    (keeper,) = keepers(job)
    os.kill(keeper, signal.SIGKILL)
    ends(job, 1)
    said = job.nodes[0].said()
    assert said.count("CheckpointError: ") >= 1, job.dump()
    assert "elastic-keeper) is gone" in said


# --- one script, line by line --------------------------------------------------------------------


class Script:
    """keeps.py, which takes a step for each line that it is told."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def hears(self, line: str = "step") -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.says()

    def says(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE)[0]
        return self.process.stdout.readline().strip()

    def ends(self) -> str:
        """Its last words."""
        _, said = self.process.communicate(timeout=DEADLINE)
        return said


@contextmanager
def script(job: Job, case: str, environ: Mapping[str, str] | None = None) -> Iterator[Script]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PYTHON"))}
    process = subprocess.Popen(
        (sys.executable, str(KEEPS), str(job.folder), case),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**variables, "PYTHONPATH": str(ROOT), **(environ or {})},
        cwd=job.folder,
    )
    with process:
        yield Script(process)
        process.kill()


def test_a_checkpointer_made_again_goes_on_from_the_one_before(job: Job) -> None:
    with script(job, "plain") as one:
        assert one.says() == "loaded 0 0"
        assert one.hears() == "saved 1"
        assert one.hears("again") == "loaded 1 1"
        assert one.hears("persist") == "saved 2"
        assert one.hears() == "saved 3"
        one.process.kill()
        with script(job, "plain") as other:
            assert other.says() == "loaded 3 3"
            assert other.ends() == ""
    gone(*keepers(job))
    assert on_storage(job) == [1, 2, 3]


def test_a_rank_with_more_than_a_thousand_open_files(job: Job) -> None:
    """One that waits for the one before, saves, writes and loads."""
    with script(job, "plain") as before:
        assert before.says() == "loaded 0 0"
        assert before.hears() == "saved 1"
        with script(job, "files") as one:
            assert before.ends() == ""
            assert one.says() == "loaded 1 1"
            assert one.hears("persist") == "saved 2"
            assert one.hears("again") == "loaded 2 2"
            assert one.ends() == ""
    gone(*keepers(job))
    assert on_storage(job) == [1, 2]


def test_another_script_reads_beside_one_that_runs(job: Job) -> None:
    with script(job, "plain") as one:
        assert one.says() == "loaded 0 0"
        assert one.hears("persist") == "saved 1"
        assert one.hears() == "saved 2"
        with script(job, "plain") as other:
            assert other.says() == "loaded 1 1"


def test_a_process_that_a_rank_leaves_behind_does_not_keep_its_helper(job: Job) -> None:
    os.mkfifo(job.folder / "pipe")
    with script(job, "fork") as one:
        assert one.says() == "loaded 0 0"
        assert one.hears() == "saved 1"
        held = keepers(job)
        assert len(held) == 1
        one.process.kill()
        gone(*held)
        (job.folder / "pipe").open("wb").close()
    assert on_storage(job) == [1]


def test_a_helper_that_is_killed_fails_the_next_call(job: Job) -> None:
    with script(job, "plain") as one:
        assert one.says() == "loaded 0 0"
        assert one.hears() == "saved 1"
        for pid in keepers(job):
            os.kill(pid, signal.SIGKILL)
            gone(pid)
        assert one.hears() == ""
        said = one.ends()
    assert said.startswith("CheckpointError: the keeper of this rank's snapshots")
    assert said.count("\n") == 1
    job.assert_nothing_left()


def test_a_flusher_that_dies_under_a_keeper_is_reaped_and_replaced(job: Job) -> None:
    with script(job, "plain") as one:
        assert one.says() == "loaded 0 0"
        assert one.hears("persist") == "saved 1"
        job.wait_for("step 1 on storage", lambda: on_storage(job) == [1])
        (keeper,) = keepers(job)
        (flusher,) = processes.children(keeper)
        os.kill(flusher.pid, signal.SIGKILL)
        job.wait_for("its reaping", lambda: processes.look(flusher.pid) is None)
        assert one.hears("persist") == "saved 2"
        job.wait_for("step 2 on storage", lambda: on_storage(job) == [1, 2])
        assert "the flusher died and is started again" in one.ends()
    gone(keeper)
    job.assert_nothing_left()


def of_two(job: Job, rank: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": job.address, **more}


def test_ranks_that_never_come_are_missed_in_a_line(job: Job) -> None:
    port = (
        free_port()
    )  # torch's store takes it on all addresses, those of other tests' jobs among them
    with script(job, "absent", of_two(job, 0, MASTER_PORT=str(port))) as alone:
        said = alone.ends()
    assert said.startswith(f"CheckpointError: {job.folder}/checkpoint: ")
    assert "each of which must make a Checkpointer" in said
    assert said.count("\n") == 1, said
    job.assert_nothing_left()


def test_a_launch_that_does_not_say_where_rank_0_is(job: Job) -> None:
    with script(job, "plain", of_two(job, 0)) as one:
        said = one.ends()
    assert said == (
        "CheckpointError: WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not: start the "
        "script with torchrun, or call init_process_group before you make a Checkpointer\n"
    )

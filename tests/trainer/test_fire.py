"""A job of two nodes, tensor and pipeline parallel, loses ranks in each phase, then a node, and gets another
one: two replicas, one, two. All in memory, and it ends with the bits of the run that nothing happened to.
"""

import re
import signal
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from elastic.proto.moment import Moment
from elastic.trainer.watch import jsonl
from tests.e2e.harness import FORK, Job, Node, processes, slots
from tests.trainer.launch import assert_same, finish, start, training

pytestmark = pytest.mark.xdist_group("fire")  # one run without faults for all of them

FAULTS = (
    "forward@1:3", "backward@2:6", "pause@3:7", "node@3:7",  # two replicas; then one
    "optimizer@4:2", "pause@5:1", "save@7:5", "restore@0:6",  # two again, after the pause
)  # fmt: skip
STEPS = 24
"""Enough are left for a node to come in time, once the pause is over."""
LAYOUT = (
    f"--train-iters={STEPS}", "--global-batch-size=6", "--num-layers=4",
    "--tensor-model-parallel-size=2", "--sequence-parallel", "--pipeline-model-parallel-size=2",
    "--use-distributed-optimizer",
)  # fmt: skip
COMPARED = "--check-weight-hash-across-dp-replicas-interval=1"
"""Replicas are, behind each step, while there are two: nothing is said of them, and no bit changes."""
TWO_STAGES = "--num-virtual-stages-per-pipeline-rank=2"
SCHEDULES = {
    "1f1b": (),
    "gpipe": ("--pipeline-schedule=gpipe",),
    "interleaved": (TWO_STAGES,),
    "zero-bubble": (TWO_STAGES, "--pipeline-schedule=zero-bubble"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run that nothing happened to: one replica, 1F1B."""
    made = tmp_path_factory.mktemp("fire")
    finish(start(made, "whole", *LAYOUT, nproc=4))
    return made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "schedule",
    [name if name == "1f1b" else pytest.param(name, marks=pytest.mark.soak) for name in SCHEDULES],
)
def test_a_job_under_fire_ends_with_the_same_bits(job: Job, base: Path, schedule: str) -> None:
    run(job, base, schedule, *SCHEDULES[schedule], COMPARED)
    lines = [line for line in jsonl.read(base / f"{schedule}.jsonl") if line["kind"] == "step"]
    assert [size for size, _ in groupby(line["world_size"] for line in lines)] == [8, 4, 8]
    said = job.nodes[0].said()  # it has the master
    begins = dict(re.findall(r"round (\d+) (begins anew|goes on from .*)", said))
    first, *later = begins.values()
    assert first == "begins anew"
    assert len(later) >= 6, "for each rank, the node that was lost, and the one that came"
    assert [how for how in later if not how.endswith(", in memory")] == [], job.dump()
    assert_same(base, "whole", schedule)


@pytest.mark.soak
def test_two_replicas_to_which_nothing_happens_end_with_the_bits_of_one(base: Path) -> None:
    finish(start(base, "two", *LAYOUT, nproc=8))
    assert_same(base, "whole", "two")


def run(job: Job, base: Path, save: str, *flags: str) -> None:
    """Of two nodes, to its end, through `FAULTS`."""
    notes = job.folder / "faults"
    notes.mkdir()
    script = ("-m", "tests.trainer.faulty")
    entry = training(base, save, *LAYOUT, *flags, script=script)
    environ = {"FAULTS": " ".join(FAULTS), "FAULTS_FOLDER": str(notes)}

    def node(*flags: str) -> Node:
        flags = ("--last-call=6", FORK, *flags)
        return job.start(*flags, nodes="1:2", nproc=4, entry=entry, environ=environ)

    def paused(number: int) -> int:
        note = notes / f"{number}-{FAULTS[number]}"
        return job.wait_for(
            note.name, lambda: (note.exists() and int(note.read_text() or 0)) or None
        )

    first = node()
    elsewhere = ("--rdzv-conf=is_host=false",)  # so the first one has the master, and is not lost
    node(*elsewhere)
    rank = paused(FAULTS.index("pause@3:7"))
    job.wait_for("replicas of the second node on the first", lambda: whole(first) or None)
    processes.kill(rank, number=signal.SIGCONT)
    rank = paused(FAULTS.index("pause@5:1"))
    assert not list((base / save).glob("step-*")), "nothing is on storage before the end"
    node(*elsewhere)
    job.wait_for_event("more nodes came: 2 nodes")
    processes.kill(rank, number=signal.SIGCONT)
    job.ends(0, -signal.SIGKILL, 0)
    struck = sorted(note.name.partition("-")[2] for note in notes.iterdir())
    assert struck == sorted(FAULTS), job.dump()


def whole(node: Node) -> set[Moment]:
    """The moments that it could restore alone, of all eight ranks."""
    held = slots.held(node.guardian)
    return set.intersection(*(held[rank] for rank in range(8)))

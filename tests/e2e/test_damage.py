"""What is damaged, in memory, on storage or in both: the job goes on by itself from the next good copy or
step, with the right bits, and no restart of the script's is spent on it."""

import json
import mmap
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest, slot
from elastic.proto.errors import SlotError
from elastic.proto.moment import Moment
from tests.e2e.harness import FORK, Job, processes

SCRIPTS = Path(__file__).parent / "harness" / "scripts"
PERSIST = ("--persist-every", "1")


def start(job: Job, *script: str) -> None:
    job.start(
        FORK, "--max-restarts", "0", entry=(str(SCRIPTS / "saves.py"), str(job.folder), *script)
    )


def flip(file: Path, name: str = "own") -> None:
    """A bit of a tensor that one rank alone has."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


# --- memory --------------------------------------------------------------------------------------


@contextmanager
def held(job: Job, rank: int) -> Iterator[dict[Moment, memoryview]]:
    """A rank's images in the guardian's memfds, which may be written to; all ranks stand still."""
    number = job.round()
    pids = [job.rank(number, one) for one in (0, 1)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    found: dict[Moment, memoryview] = {}
    for name in Path(f"/proc/{job.nodes[-1].guardian}/fd").iterdir():
        if "elastic-slot" not in os.readlink(name):
            continue
        fd = os.open(name, os.O_RDWR)
        memory = memoryview(mmap.mmap(fd, 0))
        os.close(fd)
        try:
            snapshot = slot.read(memory)
        except SlotError:
            continue  # it is empty, or the rank was stopped while it wrote it
        if snapshot.stamp.rank == rank:
            found[Moment(snapshot.stamp.round, snapshot.stamp.step)] = snapshot.image
    try:
        yield found
    finally:
        processes.kill(*pids, number=signal.SIGCONT)  # some of which the test may have ended


def spoil(image: memoryview) -> None:
    """Its last byte before the values: of a tensor that the rank alone has."""
    start = 8 + int.from_bytes(image[:8], "little")
    at = start + json.loads(bytes(image[8:start]))["own"]["data_offsets"][0]
    image[at] ^= 1


def check(job: Job, step: int, number: int) -> None:
    """Round `number` went on from that step, with the bits that it had, and to the end."""
    bits = {
        (line.rank, line.fields["step"]): (line.fields["digest"], line.fields["own"])
        for line in reversed(job.told("computed"))
    }
    loaded = job.told("loaded", round=number)
    assert [line.fields["step"] for line in loaded] == [step, step], job.dump()
    for line in loaded:
        assert (line.fields["digest"], line.fields["own"]) == bits[line.rank, step], job.dump()


def told_of(job: Job, what: str, times: int = 1) -> None:
    """It is named wherever a recovery is."""
    report = job.report()
    assert report["restarts_by_cause"].get("checkpoint damaged") == times, job.dump()
    reasons = [one["reason"] for one in report["interruptions"]]
    assert any(what in reason for reason in reasons), reasons
    assert what in job.ctl("events")
    assert what in job.nodes[-1].said()


def kill(job: Job) -> None:
    job.kill(job.round(), 1)


def test_a_step_that_is_damaged_in_memory_gives_way_to_the_one_before_it(job: Job) -> None:
    start(job, "--own", "3000")
    job.wait_for_steps(2, count=4)
    with held(job, 0) as zero, held(job, 1) as one:
        both = sorted(zero.keys() & one.keys())
        for moment in one.keys() - set(both[:-1]):
            spoil(one[moment])
        kill(job)
    job.wait_for_steps(2, after=2, count=3)
    job.finish()
    job.ends(0)
    check(job, both[-2].step, 3)
    told_of(job, f"step {both[-1].step} of checkpoint {job.folder}/checkpoint is damaged: "
            "the slot of rank 1: own is damaged")  # fmt: skip
    assert len(job.told("loaded", round=2)) < 2, "nobody went on from it alone"


def on_storage(job: Job, moment: Moment) -> bool:
    found = manifests.sound(Folder(job.folder / "checkpoint"), moment.step)
    return found is not None and found.moment == moment


@pytest.mark.parametrize(
    "too", [pytest.param(False, marks=pytest.mark.soak), True], ids=["memory", "and its storage"]
)
def test_a_step_that_is_damaged_in_memory_is_taken_from_storage(job: Job, too: bool) -> None:
    """And where it is damaged there too, the one before it from memory."""
    start(job, "--own", "3000", "--step-time", "1", *PERSIST)
    job.wait_for_steps(2, count=4)

    def spoiled() -> list[Moment] | None:
        """The steps that both had; None where the newest of them is not on storage yet."""
        with held(job, 0) as zero, held(job, 1) as one:
            both = sorted(zero.keys() & one.keys())
            if not on_storage(job, both[-1]):
                return None
            for moment in one.keys() - set(both[:-1]):
                spoil(one[moment])
            if too:
                flip(shard(job.folder / "checkpoint" / manifest.folder(both[-1].step), 1))
            kill(job)
            return both

    both = job.wait_for("a step that is on storage while it is the newest", spoiled)
    last = 3 + too
    job.wait_for_steps(2, after=last - 1, count=1)
    job.finish()
    job.ends(0)
    check(job, both[-2 if too else -1].step, last)
    told_of(job, "the slot of rank 1: own is damaged", 1 + too)
    if too:
        told_of(job, ".safetensors: own is damaged", 2)


# --- storage -------------------------------------------------------------------------------------


def shard(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"shard-{rank:05}-*"))


def swap(folder: Path) -> None:
    zero, one = shard(folder, 0), shard(folder, 1)
    other = zero.with_suffix(".other")
    zero.rename(other)
    one.rename(zero)
    other.rename(one)


def test_the_same_command_goes_on_from_the_newest_step_that_is_sound(job: Job) -> None:
    """What cannot be seen before a tensor is read costs a round, all else nothing."""
    start(job, "--own", "3000", *PERSIST)
    here = job.folder / "checkpoint"
    job.wait_for("six steps", lambda: len(list(here.glob("step-*/manifest.json"))) >= 6 or None)
    job.finish()
    job.ends(0)
    *_, sound, stale, swapped, missing, cut, flipped = sorted(
        path.parent for path in here.glob("step-*/manifest.json")
    )
    shutil.copyfile(shard(sound, 1), shard(stale, 1))
    swap(swapped)
    shard(missing, 1).unlink()
    os.truncate(shard(cut, 1), 5000)
    flip(shard(flipped, 1))
    rounds = job.round()
    start(job, "--own", "3000", *PERSIST)
    job.ends(0)
    step = manifest.step_of(sound.name)
    assert step is not None
    check(job, step, rounds + 2)
    assert job.round() == rounds + 2, job.dump()
    told_of(job, f"{shard(flipped, 1).name}: own is damaged")
    said = job.nodes[-1].said()
    for folder in (stale, swapped, missing, cut):
        assert f"{folder}/shard-0000" in said, "what was passed over is named"


def test_where_nothing_is_sound_every_rank_says_what_is_missing(job: Job) -> None:
    """Whichever is heard first; and none begins anew."""
    start(job, "--own", "3000")
    job.wait_for_steps(2, count=2)
    job.finish()
    job.ends(0)
    before = len(job.told("loaded"))
    (folder,) = (job.folder / "checkpoint").glob("step-*")
    gone = shard(folder, 1)
    gone.unlink()
    start(job, "--own", "3000")
    assert job.nodes[-1].exit_code() == 1, job.dump()
    assert len(job.told("loaded")) == before, job.dump()
    said = job.nodes[-1].said()
    lines = said.splitlines()
    errors = [one for one in lines if one.startswith("[rank") and "CheckpointError: " in one]
    assert errors, job.dump()
    assert all(str(gone) in line for line in errors), errors


# --- storage that hangs --------------------------------------------------------------------------


def test_what_is_in_memory_is_loaded_while_storage_hangs(job: Job) -> None:
    """A manifest that never opens. Nobody tries: not even of a step that is newest by its name."""
    start(job, "--own", "3000")
    job.wait_for_steps(2, count=3)
    stuck = job.folder / "checkpoint" / manifest.folder(99_999_999) / manifest.NAME
    stuck.parent.mkdir(parents=True)
    os.mkfifo(stuck)
    for number in (1, 2):
        kill(job)
        job.wait_for_steps(2, after=number, count=2)
    with pytest.raises(OSError, match="No such device or address"):
        os.open(stuck, os.O_WRONLY | os.O_NONBLOCK)  # there is no reader
    shutil.rmtree(stuck.parent)
    job.finish()
    job.ends(0)


# --- more than one load --------------------------------------------------------------------------


def test_each_load_of_a_round_gets_what_is_whole_by_then(job: Job) -> None:
    """Also by another checkpointer; none goes back behind what the round has saved."""
    job.start(entry=(str(SCRIPTS / "loads.py"), str(job.folder)))
    job.ends(0)
    for rank in (0, 1):
        found = [
            (line.fields["step"], line.fields["own"]) for line in job.told("loaded", rank=rank)
        ]
        last = [3.0 + rank] * 3
        assert found == [(0, [float(rank)] * 3), (3, last), (3, last)]
        zero, back, never = (line.fields["why"] for line in job.told("refused", rank=rank))
        assert zero == "steps are counted from 1: step 0 cannot be loaded"
        assert (
            "ranks that are started anew (`elasticctl restart --from`) go back behind that" in back
        )
        assert never.endswith("/checkpoint has no step 9")

"""Snapshots on their way to storage: what is reported to be there is there, whatever dies or fails."""

import asyncio
import contextlib
import logging
import mmap
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from elastic.agent.settings import AgentSettings, LogSettings, Workload
from elastic.agent.snapshots import flushes, side_process
from elastic.agent.snapshots.flushes import Flushes
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest, slot, sums
from elastic.proto import master_pb2 as pb
from elastic.proto.security import Security
from elastic.proto.sums import Chunk
from elastic.proto.terms import Retention, Terms
from tests.elastic.checkpoint.shards import commit

DEADLINE = 150.0
MOMENT = (3, 7)
"""Round and step."""


def settings(python: str = sys.executable) -> AgentSettings:
    work = Workload(kind="script", entry="/", python=python, environ=dict(os.environ), cwd="/")
    return AgentSettings(
        run_id="job",
        node_id="node",
        slots=1,
        master="",
        host="127.0.0.1",
        workload=work,
        logs=LogSettings(run_dir=None),
        security=Security(),
    )


class Snapshot:
    """A slot that a rank has written, and the file that is to come of it."""

    def __init__(
        self,
        data: bytes,
        rank: int = 0,
        moment: flushes.Key = MOMENT,
        value: float | None = None,
    ) -> None:
        part = 5000
        chunks = [
            Chunk(min(at + part, len(data)), sums.checksum(data[at : at + part]))
            for at in range(0, len(data), part)
        ]
        self.table = sums.pack(chunks)
        self.image = data + self.table
        self.fd = slot.create(slot.bytes_for(len(self.image)))
        self.view = memoryview(mmap.mmap(self.fd, 0))
        stamp = slot.Stamp(
            job="job", step=moment[1], round=moment[0], rank=rank, world_size=2, generation=1,
            value=value,
        )  # fmt: skip
        writing = slot.Writing(self.view, stamp, len(self.image), len(chunks))
        writing.image[: len(data)] = data
        writing.commit(chunks, ())
        self.name = f"step-{moment[1]:08}/shard-{rank:05}-of-00002.r{moment[0]}-job.safetensors"
        self.shard = pb.Shard(rank=rank, bytes=len(self.image), digest=sums.checksum(self.table))

    @property
    def claimed(self) -> bool:
        own = slot.claim(self.fd, exclusive=True)
        if own is not None:
            os.close(own)
        return own is None


class Node:
    """An agent's part in it, as a test sees it."""

    def __init__(self, path: Path, node: AgentSettings | None = None) -> None:
        self.path = path
        self.news = asyncio.Event()
        self.flushes = Flushes(node or settings(), str(path), self.news.set)

    def write(self, *snapshots: Snapshot, moment: flushes.Key = MOMENT) -> bool:
        slots = {snapshot.shard.rank: snapshot.fd for snapshot in snapshots}
        return self.flushes.write("job", moment, 2, slots)

    def commit(self, *shards: pb.Shard, moment: flushes.Key = MOMENT) -> None:
        at = pb.Moment(round=moment[0], step=moment[1])
        self.flushes.commit("job", pb.Commit(moment=at, shards=shards))

    @property
    def written(self) -> dict[flushes.Key, flushes.Written]:
        return self.flushes.written

    @property
    def busy(self) -> bool:
        return self.flushes.busy

    async def done(self) -> None:
        """Until nothing is left to do."""
        async with asyncio.timeout(DEADLINE):
            while self.busy:
                self.news.clear()
                await self.news.wait()

    def process(self) -> subprocess.Popen[bytes]:
        assert self.flushes._side._process is not None
        return self.flushes._side._process

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file())


@contextlib.asynccontextmanager
async def node(path: Path, of: AgentSettings | None = None) -> AsyncIterator[Node]:
    made = Node(path, of)
    try:
        yield made
    finally:
        made.flushes.kill()
        if made.flushes._side._process is not None:
            made.flushes._side._process.wait()
        if made.flushes._side._end is not None:
            asyncio.get_running_loop().remove_reader(made.flushes._side._end)
            made.flushes._side._end.close()
        for task in made.flushes._tasks.values():
            if task.fd is not None:
                os.close(task.fd)


@pytest.fixture
def snapshot() -> Iterator[Callable[..., Snapshot]]:
    made: list[Snapshot] = []

    def make(
        data: bytes, rank: int = 0, moment: flushes.Key = MOMENT, value: float | None = None
    ) -> Snapshot:
        made.append(Snapshot(data, rank, moment, value))
        return made[-1]

    yield make
    for one in made:
        os.close(one.fd)


class Said(logging.Handler):
    """What the log said, for who waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.news = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.news.set()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.lines) < count:
                self.news.clear()
                await self.news.wait()


@contextlib.contextmanager
def listening() -> Iterator[Said]:
    said = Said()
    flushes.log.addHandler(said)
    try:
        yield said
    finally:
        flushes.log.removeHandler(said)


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """It does nothing meanwhile."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield
    process.send_signal(signal.SIGCONT)


async def retried(here: Node, times: int) -> None:
    """Until all that is to be done was tried so often again."""
    for task in here.flushes._tasks.values():
        seen = {task.again}
        async with asyncio.timeout(DEADLINE):
            while len(seen - {None}) <= times:
                await asyncio.sleep(0)
                seen.add(task.again)


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 2 * DEADLINE))


Make = Callable[..., Snapshot]


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_snapshot_is_on_storage_byte_by_byte(tmp_path: Path, snapshot: Make, where: str) -> None:
    async def test(path: Path) -> None:
        sizes = (0, 1, 4079, 4080, 4081, 8192, 40_000, (16 << 20) + 1)
        async with node(path) as here:
            for step, size in enumerate(sizes, 1):
                shards = [
                    snapshot(noise(size), 0, (1, step)),
                    snapshot(noise(size + 1), 1, (1, step)),
                ]
                here.write(*shards, moment=(1, step))
                assert here.busy
                assert all(one.claimed for one in shards), "before anybody hears of it"
                await here.done()
                assert not any(one.claimed for one in shards)
                for one in shards:
                    assert (path / one.name).read_bytes() == one.image
                    assert here.written[1, step].shards[one.shard.rank] == one.shard
                    assert stat.S_IMODE((path / one.name).stat().st_mode) == 0o644
            assert sorted(here.written) == [(1, step) for step in range(1, len(sizes) + 1)]
            assert len(here.files()) == 2 * len(sizes), "no drafts"

    if where == "memory":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # has no direct writes
            run(test(Path(folder)))
    else:
        run(test(tmp_path / "deep" / "er"))


def test_a_slot_that_is_being_written_is_passed_over(tmp_path: Path, snapshot: Make) -> None:
    async def test() -> None:
        one = snapshot(noise(9000))
        claim = slot.claim(one.fd, exclusive=True)
        assert claim is not None
        async with node(tmp_path) as here:
            here.write(one)
            assert not here.busy
        os.close(claim)

    run(test())


@pytest.mark.parametrize("wrong", ["step", "round", "header", "unfinished"])
def test_a_slot_that_was_written_over_before_it_was_claimed_is_passed_over(
    tmp_path: Path, snapshot: Make, wrong: str
) -> None:
    async def test() -> None:
        other = {"step": (3, 8), "round": (4, 7)}.get(wrong, MOMENT)
        one, good = snapshot(noise(9000), 0, other), snapshot(noise(9000), 1)
        if wrong == "header":
            one.view[33] ^= 1
        elif wrong == "unfinished":
            one.view[16:24] = bytes(8)
        async with node(tmp_path) as here:
            assert not here.write(one)
            assert not here.busy
            assert not one.claimed
            assert here.write(one, good)
            await here.done()
            assert here.files() == [good.name], "the others' shards are written"
            assert not here.flushes.damaged

    run(test())


def test_a_damaged_slot_is_said_and_never_on_storage(tmp_path: Path, snapshot: Make) -> None:
    async def test() -> None:
        one, good = snapshot(noise(9000), 0), snapshot(noise(9000), 1)
        one.view[slot.PAGE + 6000] ^= 1
        async with node(tmp_path) as here:
            with listening() as said:
                here.write(one, good)
                await here.done()
            (line,) = said.lines
            assert line == (
                f"checkpoint {tmp_path}: step 7: bytes 5000 to 9000 in the slot of rank 0 are damaged"
            )
            assert not one.claimed
            assert here.flushes.damaged.keys() == {(MOMENT, 0)}
            assert here.files() == [good.name], "the others' shards are written"
            complaint = here.flushes.complaint.reason
            assert complaint.startswith("step 7 will not be: bytes 5000 to 9000"), "ranks are told"
            later = [snapshot(noise(9000), rank, (3, 8)) for rank in (0, 1)]
            here.write(*later, moment=(3, 8))
            await here.done()
            here.commit(*(one.shard for one in later), moment=(3, 8))
            await here.done()
            assert here.flushes.complaint.reason == "", "until something later is there"

    run(test())


def test_storage_that_fails_is_said_once_and_tried_until_it_works(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        path = tmp_path / "file" / "checkpoint"
        path.parent.write_text("in the way")
        shards = [snapshot(noise(9000), rank) for rank in (0, 1)]
        async with node(path) as here:
            with listening() as said:
                here.write(*shards)
                await said.wait(1)
                await retried(here, 5)
                assert len(said.lines) == 1, "once, whatever number of files it is true of"
                assert "Not a directory" in said.lines[0]
                assert here.flushes.complaint.reason == "Not a directory"
                assert all(one.claimed for one in shards)
                path.parent.unlink()
                await here.done()
                assert here.flushes.complaint.reason == ""
            assert [(path / one.name).read_bytes() for one in shards] == [
                one.image for one in shards
            ]

    run(test())


def test_a_storage_that_hangs_is_said_once_and_written_to_when_it_answers(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe in the place of the file: who opens it waits for a reader."""

    async def test() -> None:
        monkeypatch.setattr(flushes, "SILENCE", 0.1)
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        shards = [snapshot(noise(9000), rank) for rank in (0, 1)]
        file = tmp_path / shards[0].name
        file.parent.mkdir()
        pipe = file.with_name(manifest.draft(file.name, socket.gethostname()))
        os.mkfifo(pipe)
        async with node(tmp_path) as here:
            with listening() as said:
                here.write(*shards)
                await said.wait(1)
                assert "does not answer for 0.1 s" in said.lines[0]
                assert "does not answer" in here.flushes.complaint.reason
                assert all(one.claimed for one in shards)
                reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
                await here.done()
                os.close(reader)
                assert sum("does not answer" in line for line in said.lines) == 1
            assert here.flushes.complaint.reason == ""
            assert [(tmp_path / one.name).read_bytes() for one in shards] == [
                one.image for one in shards
            ]

    run(test())


@pytest.mark.parametrize(
    ("elsewhere", "why"),
    [
        ("/proc/self/mem", "Input/output error"),  # of each write
        ("/sys/kernel/uevent_seqnum", "Permission denied"),  # to open it
    ],
    ids=["broken", "forbidden"],
)
def test_a_disk_that_fails_is_said_once_and_written_to_when_it_works(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch, elsewhere: str, why: str
) -> None:
    """A link in the place of the file, to what the kernel lets nobody write."""

    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        one = snapshot(noise(9000))
        file = tmp_path / one.name
        file.parent.mkdir()
        draft = file.with_name(manifest.draft(file.name, socket.gethostname()))
        draft.symlink_to(elsewhere)
        async with node(tmp_path) as here:
            with listening() as said:
                here.write(one)
                await said.wait(1)
                assert why in said.lines[0]
                draft.unlink(missing_ok=True)
                await here.done()
                assert len(said.lines) == 1
            assert here.flushes.complaint.reason == ""
            assert here.files() == [one.name]
            assert file.read_bytes() == one.image

    run(test())


def test_who_commits_deletes_what_is_not_to_be_kept(tmp_path: Path, snapshot: Make) -> None:
    async def test() -> None:
        async with node(tmp_path) as here:
            here.flushes.terms = Terms(retention=Retention(last=1, best=1))
            for step, value in ((1, 0.5), (2, 0.25), (3, 0.75), (4, None)):
                shards = [snapshot(noise(9000), rank, (1, step), value) for rank in (0, 1)]
                here.write(*shards, moment=(1, step))
                await here.done()
                here.commit(*(one.shard for one in shards), moment=(1, step))
                await here.done()
            assert sorted(path.name for path in tmp_path.iterdir()) == [
                manifest.folder(2),
                manifest.folder(4),
            ]
            found = manifest.loads((tmp_path / manifest.folder(2) / manifest.NAME).read_bytes())
            assert (found.value, found.sequence) == (0.25, 2)

    run(test())


def test_what_a_crash_has_left_goes_with_the_next_commit_whatever_is_to_be_kept(
    tmp_path: Path, snapshot: Make
) -> None:
    async def test() -> None:
        left = tmp_path / manifest.folder(1) / manifest.file(1, 2, 1, "job")
        left.parent.mkdir()
        left.touch()
        async with node(tmp_path) as here:
            for step in (2, 3):
                shards = [snapshot(noise(9000), rank, (1, step)) for rank in (0, 1)]
                here.write(*shards, moment=(1, step))
                await here.done()
                here.commit(*(one.shard for one in shards), moment=(1, step))
                await here.done()
            names = sorted(path.name for path in tmp_path.iterdir())
            assert names == [manifest.folder(2), manifest.folder(3)], "all steps are kept"

    run(test())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "elastic-flushes", str(disk))
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(("umount", "-l", str(disk)), check=True)


def test_a_full_disk_keeps_no_half_of_a_file_and_what_was_there(
    small_disk: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        one = snapshot(noise(900_000))
        async with node(small_disk) as here:
            filler = small_disk / "filler"
            filler.write_bytes(bytes(500_000))
            (small_disk / one.name).parent.mkdir()
            (small_disk / one.name).write_bytes(b"before")
            with listening() as said:
                here.write(one)
                await said.wait(1)
            assert "No space left on device" in said.lines[0]
            with stopped(here.process()):
                drafts = [name for name in here.files() if "/." in name]
                assert len(drafts) <= 1, "the one that is being tried now"
                assert (small_disk / one.name).read_bytes() == b"before"
            filler.unlink()
            await here.done()
            assert here.files() == [one.name]
            assert (small_disk / one.name).read_bytes() == one.image

    run(test())


def test_a_full_disk_keeps_no_half_of_a_manifest(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", DEADLINE)
        folder = small_disk / manifest.folder(MOMENT[1])
        folder.mkdir()
        shard = folder / manifest.file(0, 1, MOMENT[0], "job")
        shard.touch()
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(2 << 20))
        async with node(small_disk) as here:
            with listening() as said:
                here.commit(pb.Shard(rank=0, bytes=1, digest=2))
                await said.wait(1)
            assert "No space left on device" in said.lines[0]
            assert here.files() == ["filler", str(shard.relative_to(small_disk))]

    run(test())


def test_another_flusher_goes_on_where_one_was_killed(
    tmp_path: Path,
    snapshot: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        first = [snapshot(noise(9000), rank, (3, 6)) for rank in (0, 1)]
        shards = [snapshot(noise(20 << 20), rank) for rank in (0, 1)]
        async with node(tmp_path) as here:
            here.write(*first, moment=(3, 6))
            await here.done()
            dead = here.process()
            with stopped(dead):
                here.write(*shards)
                here.commit(*(one.shard for one in first), moment=(3, 6))
                dead.kill()
            await here.done()
            assert dead.wait() == -signal.SIGKILL
            assert here.process() is not dead
            assert here.flushes.pids == {here.process().pid}
            assert [here.written[MOMENT].shards[r] for r in (0, 1)] == [s.shard for s in shards]
            assert all((tmp_path / one.name).read_bytes() == one.image for one in shards)
            assert here.written[3, 6].committed
            assert not any(one.claimed for one in shards)
            assert not [name for name in here.files() if "/." in name]
        assert caplog.text.count("the flusher died") == 1

    caplog.set_level(logging.WARNING)
    run(test())


def test_a_flusher_that_is_killed_again_and_again_while_it_writes(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        one = snapshot(noise(30 << 20))
        draft = tmp_path / one.name
        loop = asyncio.get_running_loop()
        async with node(tmp_path) as here:
            dead = []
            here.write(one)
            for _ in range(3):
                process = here.process()
                ended = asyncio.Event()
                pidfd = os.pidfd_open(process.pid)
                loop.add_reader(pidfd, ended.set)
                # it has begun once there is a file below the folder that it makes
                async with asyncio.timeout(DEADLINE):
                    while not any(draft.parent.glob(".shard*")):
                        assert here.busy
                        await asyncio.sleep(0)
                process.kill()
                await asyncio.wait_for(ended.wait(), DEADLINE)
                loop.remove_reader(pidfd)
                os.close(pidfd)
                async with asyncio.timeout(DEADLINE):
                    while process.pid in here.flushes.pids:
                        await asyncio.sleep(0)
                assert process.returncode == -signal.SIGKILL, "it was reaped"
                dead.append(process)
                for left in draft.parent.glob(".shard*"):
                    left.unlink()
                async with asyncio.timeout(DEADLINE):
                    while here.flushes._side._process in (process, None):
                        await asyncio.sleep(0)
                assert not draft.exists(), "it has its name only once it is whole"
            await here.done()
            assert draft.read_bytes() == one.image
            assert here.files() == [one.name]

    run(test())


def test_no_file_is_written_twice_when_its_retry_and_a_death_meet(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.3)
        path = tmp_path / "file" / "checkpoint"
        path.parent.write_text("in the way")
        one = snapshot(noise(9000))
        async with node(path) as here:
            with listening() as said:
                here.write(one)
                await said.wait(1)
            dead = here.process()
            path.parent.unlink()
            monkeypatch.setattr(
                side_process, "YOUNG", 0.0
            )  # none is too young to be replaced at once
            dead.kill()
            async with asyncio.timeout(DEADLINE):
                while here.flushes._side._process in (dead, None):
                    await asyncio.sleep(0)
            with stopped(here.process()):
                done = asyncio.create_task(here.done())
                await asyncio.wait({done}, timeout=0.5)  # the retry would be due
            await done
            written = (path / one.name).stat()
            here.write(snapshot(noise(9000), 1))
            await here.done()  # one file after the other: a second order is done by now
            assert (path / one.name).stat().st_ino == written.st_ino

    run(test())


def test_a_python_that_cannot_be_started_is_tried_again(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        python = tmp_path / "python"
        one = snapshot(noise(9000))
        async with node(tmp_path / "checkpoint", settings(str(python))) as here:
            with listening() as said:
                here.write(one)
                await said.wait(1)
            assert "the flusher cannot be asked" in said.lines[0]
            assert here.flushes.pids == set()
            script = tmp_path / "script"
            script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            script.chmod(0o755)
            script.rename(python)
            await here.done()
            assert (here.path / one.name).read_bytes() == one.image

    run(test())


def test_another_job_that_saves_to_the_same_folder_is_said_once(tmp_path: Path) -> None:
    async def test() -> None:
        storage = Folder(tmp_path)
        commit(storage, 1, sequence=1)  # by one before
        async with node(tmp_path) as here:
            shard = pb.Shard(rank=0, bytes=1, digest=2)
            with listening() as said:
                for step in range(2, 5):
                    file = tmp_path / manifest.folder(step) / manifest.file(0, 1, 1, "job")
                    file.parent.mkdir()
                    file.touch()
                    here.commit(shard, moment=(1, step))
                    await here.done()
                    assert len(said.lines) == (step > 2), "before our first it was its turn"
                    commit(storage, 10 + step, sequence=10 * step)
            assert "another job (jjjjjjjj) saves here too" in said.lines[0]

    run(test())


def test_where_another_job_saves_a_shard_that_is_gone_is_not_said_to_be_on_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        async with node(tmp_path) as here:
            shard = pb.Shard(rank=0, bytes=1, digest=2)
            file = tmp_path / manifest.folder(2) / manifest.file(0, 1, 1, "job")
            file.parent.mkdir()
            file.touch()
            here.commit(shard, moment=(1, 2))
            await here.done()
            commit(Folder(tmp_path), 12, sequence=20)
            with listening() as said:
                here.commit(shard, moment=(1, 3))  # which the other has deleted
                await said.wait(1)
            assert "the shard of rank 0 is not in" in said.lines[0]
            assert "another job (jjjjjjjj) saves here too" in said.lines[0]
            assert "share this storage" not in said.lines[0]

    run(test())


def test_a_step_whose_shards_are_on_other_nodes_disks_is_none(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node has written its own to a folder of the same name."""

    async def test() -> None:
        monkeypatch.setattr(flushes, "RETRY", 0.01)
        shards = [snapshot(noise(9000), rank) for rank in (0, 1)]
        async with node(tmp_path) as here:
            here.write(shards[0])
            await here.done()
            with listening() as said:
                here.commit(*(one.shard for one in shards))
                await said.wait(1)
            assert "the shard of rank 1 is not in" in said.lines[0]
            assert "all nodes have to share this storage" in said.lines[0]
            assert here.files() == [shards[0].name]
            here.write(shards[1])  # as of a network's, which shows it late
            await here.done()
            assert here.written[MOMENT].committed

    run(test())


def test_a_moment_is_committed_once(tmp_path: Path, snapshot: Make) -> None:
    async def test() -> None:
        shards = [snapshot(noise(9000), rank) for rank in (0, 1)]
        async with node(tmp_path) as here:
            here.write(*shards)
            await here.done()
            for _ in range(2):
                here.commit(*(one.shard for one in shards))
            assert len(here.flushes._tasks) == 1
            await here.done()
            path = tmp_path / manifest.folder(MOMENT[1]) / manifest.NAME
            written = path.stat()
            here.commit(*(one.shard for one in shards))
            assert not here.busy
            assert path.stat().st_mtime_ns == written.st_mtime_ns
            assert manifest.loads(path.read_bytes()) == manifest.Manifest(
                job="job",
                sequence=1,
                round=3,
                step=7,
                world_size=2,
                shards=tuple(
                    manifest.Shard(
                        rank=one.shard.rank,
                        file=Path(one.name).name,
                        bytes=one.shard.bytes,
                        digest=one.shard.digest,
                    )
                    for one in shards
                ),
            )
            assert here.written[MOMENT].committed
            assert here.files() == sorted(
                [*(one.name for one in shards), str(path.relative_to(tmp_path))]
            )

    run(test())


def test_what_is_on_storage_is_not_written_again(tmp_path: Path, snapshot: Make) -> None:
    """Whoever has forgotten it, or asks for it twice, or for what is damaged beside it."""

    async def test() -> None:
        good, bad = snapshot(noise(9000), 0), snapshot(noise(9000), 1)
        bad.view[slot.PAGE + 6000] ^= 1
        async with node(tmp_path) as here:
            here.write(good, bad)
            await here.done()
            written = (tmp_path / good.name).stat()
            assert not here.write(good, bad), "nothing of it is left to be done"
        async with node(tmp_path) as next_life:
            next_life.write(good, bad)
            await next_life.done()
            assert next_life.written[MOMENT].shards == {0: good.shard}
            assert next_life.flushes.damaged.keys() == {(MOMENT, 1)}
        now = (tmp_path / good.name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)

    run(test())


def test_a_flusher_with_nothing_to_do_is_ended_and_another_serves_who_comes(
    tmp_path: Path, snapshot: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(flushes, "IDLE", 0.0)
        async with node(tmp_path) as here:
            for step in (1, 2):
                here.write(snapshot(noise(9000), moment=(1, step)), moment=(1, step))
                process = here.process()
                await here.done()
                assert await asyncio.to_thread(process.wait, DEADLINE) == 0
                assert here.flushes.pids == set()
            assert "has no step 1" in str(await here.flushes.look(1))
            assert len(here.written) == 2

    run(test())


def test_the_flusher_ends_with_its_agent(tmp_path: Path, snapshot: Make) -> None:
    async def test() -> None:
        async with node(tmp_path) as here:
            here.write(snapshot(noise(100)))
            await here.done()
            process, end = here.process(), here.flushes._side._end
            assert end is not None
            asyncio.get_running_loop().remove_reader(end)
            end.close()
            here.flushes._side._end = None
            assert await asyncio.to_thread(process.wait, DEADLINE) == 0

    run(test())

"""What the flusher does to a storage: each step of it may be its last, and may have been done before."""

import mmap
import os
import random
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from elastic.checkpoint.load import files
from elastic.checkpoint.storage import flusher, manifests
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import manifest, slot, sums
from elastic.proto.errors import SlotError
from elastic.proto.flusher import Commit, Delete, Done, Write
from elastic.proto.sums import Chunk
from elastic.proto.terms import Retention
from tests.elastic.checkpoint.shards import JOB, commit

DATA = random.Random(0).randbytes(20_000)
FILE = manifest.file(0, 1, 3, JOB)


@pytest.fixture
def end() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours


def held(step: int = 7, round_: int = 3, value: float | None = None, *, flip: int = 0) -> int:
    """A slot with a snapshot; returns its descriptor."""
    chunks = [
        Chunk(min(at + 6000, len(DATA)), sums.checksum(DATA[at : at + 6000]))
        for at in range(0, len(DATA), 6000)
    ]
    fd = slot.create(slot.bytes_for(len(DATA) + sums.ENTRY * len(chunks)))
    stamp = slot.Stamp(
        job="job", step=step, round=round_, rank=0, world_size=1, generation=1, value=value
    )
    view = memoryview(mmap.mmap(fd, 0))
    writing = slot.Writing(view, stamp, len(DATA) + sums.ENTRY * len(chunks), len(chunks))
    writing.image[: len(DATA)] = DATA
    writing.commit(chunks, ())
    view[slot.PAGE + flip] ^= bool(flip)
    return fd


def write(end: socket.socket, here: Folder, fd: int) -> Done:
    message = Write(id=1, checkpoint=here.url, job=JOB, round=3, step=7, file=FILE)
    return flusher._write(end, here, message, fd)


def publish(here: Folder, done: Done, *, round_: int = 3, value: float | None = None) -> Done:
    shard = manifest.Shard(rank=0, file=FILE, bytes=done.bytes, digest=done.digest)
    told = manifest.Manifest(
        job=JOB, sequence=0, round=round_, step=7, world_size=1, value=value, shards=(shard,)
    )
    fd = os.memfd_create("manifest")
    os.write(fd, manifest.dumps(told).encode())
    answer = flusher._commit(here, Commit(id=2, checkpoint=here.url), fd)
    os.close(fd)
    return answer


def inode(path: Path) -> int:
    return path.stat().st_ino


# --- once is enough ------------------------------------------------------------------------------


def test_what_a_manifest_names_is_neither_written_nor_committed_again(
    tmp_path: Path, end: socket.socket
) -> None:
    here, fd = Folder(tmp_path), held(value=0.5)
    first = write(end, here, fd)
    assert not first.committed
    assert first.value == 0.5
    publish(here, first)
    folder = tmp_path / manifest.folder(7)
    written = inode(folder / FILE), inode(folder / manifest.NAME)
    again = write(end, here, fd)
    assert again == Done(id=1, bytes=first.bytes, digest=first.digest, value=0.5, committed=True), (
        "an agent that has forgotten it is told"
    )
    publish(here, again)
    assert (inode(folder / FILE), inode(folder / manifest.NAME)) == written
    os.close(fd)


@pytest.mark.parametrize("spoil", ["gone", "short"])
def test_a_committed_file_that_is_not_there_is_written_again(
    tmp_path: Path, end: socket.socket, spoil: str
) -> None:
    here, fd = Folder(tmp_path), held()
    first = write(end, here, fd)
    publish(here, first)
    file = tmp_path / manifest.folder(7) / FILE
    whole = file.read_bytes()
    if spoil == "gone":
        file.unlink()
    else:
        os.truncate(file, 100)
    assert not write(end, here, fd).committed
    assert file.read_bytes() == whole
    os.close(fd)


def test_a_later_round_takes_the_place_of_the_step_before_it(
    tmp_path: Path, end: socket.socket
) -> None:
    """And is the newest of all, also where steps beyond it were committed before."""
    here, fd = Folder(tmp_path), held()
    done = write(end, here, fd)
    publish(here, done)
    commit(here, 9, sequence=5)
    publish(here, done, round_=4, value=0.25)
    known = manifests.committed(here)
    assert known is not None
    assert (known.step, known.round, known.sequence, known.value) == (7, 4, 6, 0.25)
    os.close(fd)


def test_a_commit_that_comes_late_makes_nothing_older_the_newest(
    tmp_path: Path, end: socket.socket
) -> None:
    """A slow node's, of the same job: what is newer stays, whatever is deleted next."""
    here, fd = Folder(tmp_path), held()
    done = write(end, here, fd)
    newer = commit(here, 9, sequence=5, round_=4)
    assert not publish(here, done).committed, "nobody is told that it is on storage"
    delete(here, last=1)
    assert manifests.committed(here) == newer
    assert list(here.listing()) == [9]
    os.close(fd)


def test_of_two_that_are_committed_at_once_the_later_is_the_newest(tmp_path: Path) -> None:
    here = Folder(tmp_path)
    for step in (8, 9, 7):
        commit(here, step, sequence=5)
    delete(here, last=2)
    newest = manifests.committed(here)
    assert newest is not None
    assert newest.step == 9
    assert sorted(here.listing()) == [8, 9]


def test_nothing_is_committed_beside_a_manifest_that_cannot_be_looked_at(
    tmp_path: Path, end: socket.socket
) -> None:
    """It may have the number that the next one would get."""
    here, fd = Folder(tmp_path), held()
    done = write(end, here, fd)
    closed = tmp_path / manifest.folder(9) / manifest.NAME
    closed.mkdir(parents=True)
    with pytest.raises(OSError, match=f"{closed} may be the newest .* directory"):
        publish(here, done)
    assert manifest.NAME not in here.listing()[7]
    closed.rmdir()
    publish(here, done)
    assert manifest.NAME in here.listing()[7]
    os.close(fd)


@pytest.mark.parametrize("other", [{"step": 8}, {"round_": 4}])
def test_another_snapshot_is_never_written(
    tmp_path: Path, end: socket.socket, other: dict[str, int]
) -> None:
    fd = held(**other)
    with pytest.raises(SlotError, match="the slot holds step"):
        write(end, Folder(tmp_path), fd)
    assert not list(tmp_path.rglob("*.safetensors*"))
    os.close(fd)


@pytest.mark.parametrize("flip", [1, 5999, 6000, 19_999])
def test_what_is_damaged_is_found_before_it_has_a_name(
    tmp_path: Path, end: socket.socket, flip: int
) -> None:
    fd = held(flip=flip)
    with pytest.raises(SlotError, match="in the slot of rank 0 are damaged"):
        write(end, Folder(tmp_path), fd)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    os.close(fd)


# --- deletion ------------------------------------------------------------------------------------


def delete(here: Folder, last: int, best: int = 0) -> None:
    rules = Retention(last=last, best=best)
    flusher._delete(here, Delete(id=3, checkpoint=here.url, retention=rules))


def test_what_is_spent_goes_and_what_is_pinned_or_not_ours_stays(tmp_path: Path) -> None:
    here = Folder(tmp_path)
    for step in range(1, 7):
        commit(here, step, sequence=step, value=float(step))
    here.publish(2, manifest.PIN, b"")
    (tmp_path / manifest.folder(3) / "notes").write_text("mine")
    here.publish(4, manifest.NAME, b"what is this", over=True)
    delete(here, last=1, best=1)
    assert sorted(here.listing()) == [1, 2, 3, 4, 6], (
        "the best, pinned, not ours, not ours, the newest"
    )
    assert here.listing()[3] == {"notes"}
    found, _ = manifests.readable(here, here.listing())
    assert [one.step for one in found] == [6, 2, 1]
    here.delete(2, [manifest.PIN])
    delete(here, last=1)
    assert sorted(here.listing()) == [3, 4, 6]


def test_who_went_back_keeps_the_step_below_until_there_are_as_many_new_ones(
    tmp_path: Path,
) -> None:
    """From 12 to 4, with the last two kept: 8 and 12 are void, and no reason to delete 4."""
    here = Folder(tmp_path)
    for sequence, step in enumerate((4, 8, 12, 5), 1):
        commit(here, step, sequence=sequence, round_=1 + (step == 5))
    delete(here, last=2)
    assert sorted(here.listing()) == [4, 5, 8, 12]
    (tmp_path / manifest.folder(5) / manifest.NAME).write_text("damaged")
    assert files.newest(here, 4)[0] is not None, "what a rollback takes if 5 is damaged"
    commit(here, 5, sequence=4, round_=2)
    for sequence, (step, left) in enumerate(
        [(6, [5, 6, 8, 12]), (12, [6, 8, 12]), (13, [12, 13])], 5
    ):
        commit(here, step, sequence=sequence, round_=2)
        delete(here, last=2)
        assert sorted(here.listing()) == left


def test_what_is_pinned_while_others_are_deleted_stays(tmp_path: Path) -> None:
    """All are looked at once; for a pin, each again just before it goes."""
    listed: list[int] = []

    class Pinning(Folder):
        def listing(self) -> dict[int, set[str]]:
            listed.append(1)
            return super().listing()

        def drop(self, step: int) -> None:
            super().drop(step)
            self.publish(2, manifest.PIN, b"pinned\n")

    here = Pinning(tmp_path)
    for step in (1, 2, 3, 4):
        commit(here, step, sequence=step)
    delete(here, last=1)
    assert len(listed) == 1
    assert sorted(here.listing()) == [2, 4]
    assert manifests.committed(here, 2) is not None


class Dying(Folder):
    """Its process is killed at one of the changes that it makes."""

    def __init__(self, root: Path, lives: int) -> None:
        super().__init__(root)
        self.lives = lives

    def delete(self, step: int, names: Iterable[str]) -> None:
        for name in names:
            self.change()
            super().delete(step, [name])

    def drop(self, step: int) -> None:
        self.change()
        super().drop(step)

    def change(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise InterruptedError


def test_wherever_a_deletion_ends_what_loads_is_whole_and_the_next_one_cleans_up(
    tmp_path: Path,
) -> None:
    for lives in range(100):
        root = tmp_path / str(lives)
        here = Folder(root)
        for step in (1, 2, 3):
            commit(here, step, sequence=step)
        ended = True
        try:
            delete(Dying(root, lives), last=1)
        except InterruptedError:
            ended = False
        for step in here.listing():
            if manifests.committed(here, step) is not None:
                assert files.sources(here, step)[1] == [], "of what is committed all is there"
        newest, wrong = files.newest(here)
        assert newest is not None
        assert (newest.step, wrong) == (3, [])
        delete(here, last=1)
        assert [path.name for path in root.iterdir()] == [manifest.folder(3)]
        if ended:
            assert lives >= 8, "two steps of a manifest, two shards and a folder"
            return
    raise AssertionError("it never came to an end")

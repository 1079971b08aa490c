import fcntl
import socket
from pathlib import Path
from typing import IO

import pytest

from elastic.trainer import files
from elastic.trainer.files import remove_drafts, replace_atomically


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replace_atomically(path) as draft:  # noqa: PT012
        draft.write_text("ne")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "data[0].bin"
    mine, other = (
        f".{name}.x1_y@{socket.gethostname()}.draft" for name in (path.name, "other.bin")
    )
    for name in (path.name, mine, other):
        (tmp_path / name).write_text("")
    remove_drafts(path)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, other}


def test_a_draft_of_who_lives_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replace_atomically(path) as first, replace_atomically(path) as second:
        remove_drafts(path)
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first", "the last one that is done"
    assert list(tmp_path.iterdir()) == [path]


def test_another_hosts_draft_whose_lock_is_not_seen_here_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(files, "claim", lambda *_, **__: True)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    with replace_atomically(path) as draft:
        with monkeypatch.context() as here:
            here.setattr(socket, "gethostname", lambda: "this")
            remove_drafts(path)
        assert draft.exists()
        remove_drafts(path)
        assert not draft.exists(), "what its own host takes for a dead one's"
        draft.write_text("whole")


def test_a_draft_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, tries = fcntl.fcntl, iter((True, False))

    def late(fd: int, command: int, told: bytes) -> bytes:
        if next(tries):
            next(tmp_path.glob(".file.*.draft")).unlink()
        return lock(fd, command, told)

    monkeypatch.setattr(fcntl, "fcntl", late)
    with replace_atomically(tmp_path / "file") as draft:
        draft.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole"


def test_a_draft_that_another_has_locked_to_remove_it_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, tries = fcntl.fcntl, iter((True, False))
    removers: list[tuple[Path, IO[bytes]]] = []

    def second(fd: int, command: int, told: bytes) -> bytes:
        if next(tries):
            taken = next(tmp_path.glob(".file.*.draft"))
            removers.append((taken, taken.open("r+b")))
            lock(removers[0][1].fileno(), command, told)
        return lock(fd, command, told)

    monkeypatch.setattr(fcntl, "fcntl", second)
    with replace_atomically(tmp_path / "file") as draft:
        for taken, file in removers:
            with file:
                taken.unlink()
        draft.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole"


def test_without_locks_nothing_is_removed_and_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "fcntl", none)
    with replace_atomically(tmp_path / "file") as draft:
        remove_drafts(tmp_path / "file")
        draft.write_text("whole")
    assert (tmp_path / "file").read_text() == "whole"

from pathlib import Path

import pytest

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
    for name in (path.name, f".{path.name}.x1_y.draft", ".other.bin.x1_y.draft"):
        (tmp_path / name).write_text("")
    remove_drafts(path)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, ".other.bin.x1_y.draft"}

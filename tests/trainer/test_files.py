from pathlib import Path

import pytest

from elastic.trainer.files import replace_atomically


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replace_atomically(path) as draft:  # noqa: PT012
        draft.write_text("ne")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

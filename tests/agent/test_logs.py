"""A round's log files: how many rounds' are kept, how long they get, what the console shows of them."""

import os
from pathlib import Path

import pytest

from elastic.agent.logs import AttemptLogs
from elastic.agent.settings import LogSettings


@pytest.mark.parametrize(("keep", "kept"), [(1, [0, 4]), (2, [0, 4]), (3, [0, 3, 4])])
def test_the_first_attempt_and_the_one_in_use_are_kept(
    tmp_path: Path, keep: int, kept: list[int]
) -> None:
    settings = LogSettings(run_dir=tmp_path, redirects=3, keep=keep)
    for number in range(1, 6):
        streams = AttemptLogs(settings, number, "role").open(0, 0)
        for fd in (streams.stdout, streams.stderr):
            os.close(fd)
        assert (tmp_path / f"attempt_{number - 1}" / "0" / "stdout.log").exists()
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"attempt_{number}" for number in kept]

import contextlib
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.watch.tensorboard import Board
from tests.trainer.watch.boards import points, texts


def test_a_restart_leaves_no_point_twice(tmp_path: Path) -> None:
    board = Board(tmp_path, iteration=0, consumed=0, arguments={})
    for step in range(1, 11):
        board.add({"lm loss": step}, step, step * 8)
        board.add({"iteration-time": 0.5}, step)
    board.close()
    for file in tmp_path.rglob("events.*"):  # of this very second, and of a name behind any other
        events, out, kind, _, rest = file.name.split(".", 4)
        file.rename(file.with_name(f"{events}.{out}.{kind}.{int(time.time())}.~{rest}"))
    again = Board(tmp_path, iteration=6, consumed=48, arguments={})
    for step in range(7, 9):
        again.add({"lm loss": 100 + step}, step, step * 8)
    again.close()
    wanted = [*range(1, 7), 107, 108]
    assert points(tmp_path) == {
        "lm loss": [(step, loss) for step, loss in enumerate(wanted, 1)],
        "iteration-time": [(step, 0.5) for step in range(1, 7)],
    }
    assert points(tmp_path / "samples") == {
        "lm loss vs samples": [(step * 8, loss) for step, loss in enumerate(wanted, 1)]
    }


def test_the_arguments_are_texts_of_the_step_that_a_life_begins_with(tmp_path: Path) -> None:
    """One each, whatever was taken back."""
    for begin, back, size in ((0, 0, 4), (6, 2, 2), (2, 2, 3)):
        arguments = {"world_size": size, "data_path": ["a", "b"], "seed": None}
        board = Board(tmp_path, iteration=begin, consumed=0, arguments=arguments)
        if back < begin:
            board.back(back, 0)
        board.close()
    assert texts(tmp_path) == {
        "world_size": [(1, "4"), (3, "3")],
        "data_path": [(1, "['a', 'b']"), (3, "['a', 'b']")],
        "seed": [(1, "None"), (3, "None")],
    }


def test_tensorflow_is_not_imported_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')")
    program = (
        "from pathlib import Path\n"
        "from elastic.trainer.watch.tensorboard import Board\n"
        f"board = Board(Path({str(tmp_path)!r}), iteration=0, consumed=0, arguments={{}})\n"
        "board.add({'lm loss': 1.0}, 1, 8)\n"
        "board.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert points(tmp_path) == {"lm loss": [(1, 1.0)]}


def test_a_folder_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--tensorboard-dir .* cannot be written to"):
        Board(tmp_path / "file", iteration=0, consumed=0, arguments={})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_fails_later_is_told_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = set(threading.enumerate())
    board = Board(tmp_path / "board", iteration=0, consumed=0, arguments={})
    shutil.rmtree(tmp_path / "board")
    for step in range(10**6):  # the writer's thread meets it, in its own time
        board.add({"lm loss": 1.0}, step)
        if board.writer is None:
            break
    board.add({"lm loss": 1.0}, step + 1)
    board.back(3, 3)
    board.close()
    assert not (tmp_path / "board").exists(), "it is not begun again"
    # What their threads meet is to be this test's, not another's.
    for writer in (board._steps, board._samples):
        with contextlib.suppress(OSError):
            writer.close()
    writers = set(threading.enumerate()) - others
    for thread in writers:
        thread.join(60)
    assert not [thread for thread in writers if thread.is_alive()]
    assert [one.getMessage().split(": ")[1:] for one in caplog.records] == [
        ["No such file or directory", "no more points until the next start"]
    ]

"""What the launcher says and refuses before anything runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WARNING = "no job token"


def launch(*flags: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """A whole job, of one program that does nothing."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_")} | environ
    command = (sys.executable, "-m", "elastic.run", *flags, "--no-python", "true")
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=150, check=False
    )


def meet(address: str) -> tuple[str, ...]:
    return ("--rdzv-backend", "c10d", "--rdzv-endpoint", address)


@pytest.mark.parametrize("flags", [meet("0.0.0.0:0"), meet("[::]:0")], ids=str)
def test_who_can_be_reached_without_a_token_is_warned(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    done = launch(*flags, "--log-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert WARNING in done.stderr
    assert WARNING not in launch(*flags, ELASTIC_JOB_TOKEN="secret").stderr


LOOPBACK: list[tuple[str, ...]] = [
    (),
    ("--standalone",),
    meet("localhost:0"),
    meet("127.1.2.3:0"),
    meet("[::1]:0"),
    (*meet("127.0.0.1:0"), "--nnodes", "1:2"),
]


@pytest.mark.parametrize("flags", LOOPBACK, ids=str)
def test_nobody_is_warned_on_loopback(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = launch(*flags, "--log-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert WARNING not in done.stderr


@pytest.mark.parametrize("flag", ["--log-dir", "--state-dir"])
def test_a_folder_that_a_stranger_may_have_filled_is_refused(flag: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "attempt_0").symlink_to("/nowhere")
    done = launch(*meet("127.0.0.1:0"), "--rdzv-id", "job", flag, str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"others may write to {folder}" in line
    assert [path.name for path in folder.iterdir()] == ["attempt_0"]


def test_a_run_id_never_leads_out_of_its_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for run_id, name in (("..", "%2E%2E"), ("a/b", "a%2Fb"), ("a_b", "a_b")):
        done = launch(*meet("127.0.0.1:0"), "--rdzv-id", run_id, "--log-dir", str(base))
        assert done.returncode == 0, done.stderr
        assert (base / name / "journal.db").is_file()
    assert list(tmp_path.iterdir()) == [base]
    assert len(list(base.iterdir())) == 3

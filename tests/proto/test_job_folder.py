"""What a job's folder is called, and whose it must be."""

import os
import tempfile
from pathlib import Path

import pytest

from elastic.proto import job_folder
from elastic.proto.job_folder import LONGEST_NAME, distrust, folder_name

STRANGER = 54321

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("run_id", ["job", "slurm-4711.3", "a_b", "Größe 7", ".x", "a..b", "..."])
def test_an_ordinary_run_id_is_the_folders_name(run_id: str) -> None:
    assert folder_name(run_id) == run_id


ODD = [
    "",
    ".",
    "..",
    "../x",
    "/etc",
    "a/b",
    "a_b",
    "a%2Fb",
    "%2E",
    "a\nb",
    "a\0b",
    "\udcff",
    "\xff",
]
LONG = ["x" * LONGEST_NAME, "x" * 300, "x" * 301, "é" * 150, "/" * 70, "/" * 71]


def test_no_two_run_ids_share_a_folder_and_none_leads_elsewhere(tmp_path: Path) -> None:
    names = [folder_name(run_id) for run_id in ODD + LONG]
    assert len(set(names)) == len(names)
    for name in names:
        path = tmp_path / name
        path.mkdir()
        assert path.resolve().parent == tmp_path.resolve()
        assert 0 < len(name.encode()) <= LONGEST_NAME
        assert name.isprintable()


def test_a_folder_of_ours_is_trusted_and_a_groups(tmp_path: Path) -> None:
    for mode in (0o700, 0o755, 0o2775):
        tmp_path.chmod(mode)
        assert not distrust(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tempfile.mkdtemp(dir=tmp_path))
    assert not distrust(link)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_that_others_may_write_to_is_not(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    folder.chmod(mode)
    assert distrust(folder) == f"others may write to {folder}"
    assert list(tmp_path.iterdir()) == [folder]  # what was tried there is gone


@needs_root
def test_a_strangers_folder_is_not_nor_his_link_to_ours(tmp_path: Path) -> None:
    folder, link = tmp_path / "job", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    os.lchown(link, STRANGER, STRANGER)
    assert not distrust(folder)
    assert "another user's" in distrust(link)
    os.chown(folder, STRANGER, STRANGER)
    assert distrust(folder) == f"{folder} is another user's (uid {STRANGER})"


STEP = '{"kind": "step", "iteration": 7, "losses": {"lm loss": 2.5}}'


@pytest.mark.parametrize(
    ("text", "iteration"),
    [
        ("", None),
        (f"{STEP}\n", 7),
        (f'{STEP}\n{STEP.replace("7", "8")}\n{{"kind": "probe"}}\nnull\n\n', 8),
        (f"{STEP}\n{STEP.replace('7', '8')}", 7),  # of which the end is not there yet
        ("[" * 4000 + f"\n{STEP}\n\xff garbage\n", 7),
        (STEP.replace("2.5", "2" * job_folder.MOST_METRICS) + "\n", None),
        ("x" * (1 << 20) + f"\n{STEP}\n", 7),
    ],
)
def test_the_newest_step_of_metrics_that_may_be_anything(
    tmp_path: Path, text: str, iteration: int | None
) -> None:
    (tmp_path / job_folder.METRICS).write_text(text, encoding="latin-1")
    found = job_folder.step_of(job_folder.newest_metrics(tmp_path))
    assert (found and found["iteration"]) == iteration


def test_no_metrics_is_nothing(tmp_path: Path) -> None:
    assert job_folder.newest_metrics(tmp_path) == ""
    os.mkfifo(tmp_path / job_folder.METRICS)
    assert job_folder.newest_metrics(tmp_path) == "", "and nobody waits for a writer"

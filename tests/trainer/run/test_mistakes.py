"""A mistake is told once, by whoever sees it first."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elastic.proto.errors import UsageError
from elastic.trainer.run import mistakes
from tests.trainer.launch import refused, start


def test_a_nodes_ranks_tell_of_one_command_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(rank: int, attempt: int, text: str) -> str:
        folder = tmp_path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        mistakes.tell(UsageError(text))
        return capsys.readouterr().err

    assert told(2, 0, "a") == "a\n", "whoever is first: the launcher may end the others"
    assert told(0, 0, "a") == ""
    assert told(3, 0, "b") == "b\n", "what only one sees is told"
    assert told(3, 1, "a") == "a\n", "of another start it is another"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "0" / "error.json"))
    for _ in range(2):
        mistakes.tell(UsageError("a"))
    assert capsys.readouterr().err == "a\na\n", "where nobody can say, it is told"


def test_a_worlds_ranks_tell_of_it_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        for text in ("a", "a", "b"):  # as if each were another rank
            mistakes.tell(UsageError(text))
    finally:
        dist.destroy_process_group()
    assert capsys.readouterr().err == "a\nb\n"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--num-experts=8", "--num-experts is Megatron's, and refused here"),
        ("--data-parallel-size=2", "--data-parallel-size 2 are 2 ranks, and the world has 3"),
    ],
)
def test_a_run_tells_of_it_once(tmp_path: Path, flag: str, said: str) -> None:
    errors = refused(start(tmp_path, "never", flag, "--train-iters=3", nproc=3))
    assert errors.count(said) == 1, errors

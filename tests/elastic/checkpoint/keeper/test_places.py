"""Ranks that find their keeper: by what is told in the job's store, of this start and of earlier ones."""

import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elastic.checkpoint.keeper import places
from elastic.proto import codec, env, keeper_process
from elastic.proto.env import Launch
from elastic.proto.errors import CheckpointError, UsageError
from elastic.proto.keeper_process import Join, Refused, Welcome

SECOND = Launch(rank=1, world_size=2, local_rank=1, local_world_size=2)
"""A rank that did not start the keeper of its node."""


@pytest.fixture
def board(tmp_path: Path) -> Iterator[places._Board]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield places._Board(str(tmp_path), SECOND)
    dist.destroy_process_group()


class KeeperProcess:
    """Answers one rank."""

    def __init__(self, path: Path) -> None:
        self.name = f"{keeper_process.prefix(str(path))}{secrets.token_hex(16)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen()
        self.heard: list[object] = []

    def answer(self, answer: bytes) -> threading.Thread:
        def serve() -> None:
            end, _ = self.listener.accept()
            with end, self.listener:
                self.heard.append(
                    codec.loads(keeper_process.Request, end.recv(keeper_process.DATAGRAM))
                )
                if answer:
                    end.send(answer)

        thread = threading.Thread(target=serve, daemon=True)  # else a failure would wait for it
        thread.start()
        return thread


def test_what_an_earlier_start_told_is_not_believed(board: places._Board, tmp_path: Path) -> None:
    gone, other, ours = (KeeperProcess(tmp_path) for _ in range(3))
    gone.listener.close()
    threads = [other.answer(b""), ours.answer(codec.dumps(Welcome(job="ours")).encode())]
    told = iter([gone, other, ours])

    def attempt() -> tuple[str, socket.socket]:
        board.tell("node 0", places._Node(name=next(told).name))
        return places._join(board, SECOND)

    job, end = places._retry(attempt, "the keeper")
    end.close()
    for thread in threads:
        thread.join()
    assert job == "ours"
    assert ours.heard == [Join(rank=1)]


def test_a_refusal_is_the_error(board: places._Board, tmp_path: Path) -> None:
    here = KeeperProcess(tmp_path)
    thread = here.answer(codec.dumps(Refused(reason="rank 0 is missing")).encode())
    board.tell("node 0", places._Node(name=here.name))
    with pytest.raises(CheckpointError, match="rank 0 is missing"):
        places._join(board, SECOND)
    thread.join()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is a number, not 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK is a number, not '-1'"),
    ],
)
def test_a_launch_that_makes_no_sense(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=reason):
        env.launch()

"""A slot of this node that is damaged: what was in it is taken from the memory of another node, or is damage."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from elastic.checkpoint.load.loading import Loading
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.storage.folder import Folder
from elastic.proto import keeper
from elastic.proto.errors import CheckpointDamaged, CheckpointError
from tests.elastic.checkpoint.keeper.test_courier import AT, Courier, Slot, wait_until
from tests.elastic.checkpoint.shards import image

NUMBERS = 3000
PATH = "/data/a b?/ü"


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    """This node's, of two ranks, each with a half of `w`; in the first a bit is wrong."""
    made = [written(rank) for rank in range(2)]
    damage = made[0].view[4096:].tobytes().index(torch.zeros(NUMBERS).numpy().tobytes())
    made[0].view[4096 + damage + 5] ^= 1
    yield made
    for one in made:
        os.close(one.fd)


def written(rank: int) -> Slot:
    data = image(rank, 2, NUMBERS)
    made = Slot(len(data))
    made.put(data, rank)
    return made


def load(
    folder: Path, slots: list[Slot], *elsewhere: keeper.Source, strict: bool = True
) -> torch.Tensor:
    """As rank 0, all of `w`; there is nothing on storage."""
    state = {"w": torch.full((2 * NUMBERS,), -1.0)}
    loading = Loading(
        path=PATH, storage=Folder(folder / "none"), moment=AT, strict=strict, only=None,
        place=Place(rank=0, world_size=2, local_rank=0, local_world_size=2),
    )  # fmt: skip
    sources = keeper.Sources(sources=elsewhere, tls=None)
    loading.from_memory(state, [one.fd for one in slots], sources)
    return state["w"]


def test_what_is_damaged_here_comes_from_the_memory_of_another_node(
    tmp_path: Path, slots: list[Slot]
) -> None:
    with Courier() as peer:
        serve(peer, 0)
        found = load(tmp_path, slots, keeper.Source(base=peer.base, ranks=(0,), needed=False))
    assert torch.equal(found, torch.arange(2.0).repeat_interleave(NUMBERS))


def test_what_is_away_is_not_what_a_checkpoint_lacks(tmp_path: Path, slots: list[Slot]) -> None:
    """Though a load may lack something, no tensor stays as it was for that."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}/secret"
        other = keeper.Source(base=away, ranks=(0,), needed=True)
        with pytest.raises(CheckpointError, match="has no w"):
            load(tmp_path, slots[1:], other, strict=False)


def serve(peer: Courier, rank: int) -> None:
    one = written(rank)
    peer.hold(one)
    os.close(one.fd)
    wait_until(lambda: peer.get(urlsplit(peer.address(rank)).path, "bytes=0-0")[0] == 206)


def test_who_has_the_copy_may_be_away_and_it_is_damage_all_the_same(
    tmp_path: Path, slots: list[Slot]
) -> None:
    """Also where others answer; so all ranks go on from something else."""
    with Courier() as peer, socket.socket() as nobody:
        serve(peer, 1)
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        away = f"http://127.0.0.1:{nobody.getsockname()[1]}/secret"
        copies = [
            keeper.Source(base=away, ranks=(0,), needed=False),
            keeper.Source(base=peer.base, ranks=(1,), needed=False),
        ]
        for sources in (copies, copies[:1], []):
            with pytest.raises(CheckpointDamaged, match="the slot of rank 0: w is damaged"):
                load(tmp_path, slots, *sources)

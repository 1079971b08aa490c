"""What exact mode fixes of NCCL."""

import os

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.parallel import kernels


def test_ranks_of_a_layer_add_up_along_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "")  # so that it is as before afterwards
    monkeypatch.delenv("NCCL_ALGO")
    kernels.ring()
    assert os.environ["NCCL_ALGO"] == "Ring"
    kernels.ring()  # as a rank that is started again has it


def test_what_was_asked_for_stays_where_it_is_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "ring")
    kernels.ring()
    assert os.environ["NCCL_ALGO"] == "ring"


@pytest.mark.parametrize("asked", ["Tree", "NVLS", "^NVLS", "Ring,Tree"])
def test_other_orders_are_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("NCCL_ALGO", asked)
    with pytest.raises(UsageError, match="may add up in another order"):
        kernels.ring()

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import UsageError
from elastic.trainer.data.batches import TOKEN_TYPE, Batches, TokenFile

TOKENS = np.arange(1000, dtype=np.uint16)


def batches(*, batch: int = 6, length: int = 10, seed: int = 3) -> Batches:
    return Batches(tokens=TOKENS, seed=seed, global_batch_size=batch, seq_length=length)


@given(
    step=st.integers(0, 10_000),
    world=st.integers(1, 9),
    batch=st.integers(1, 40),
    length=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_ranks_shares_are_the_global_batch(
    step: int, world: int, batch: int, length: int, seed: int
) -> None:
    data = batches(batch=batch, length=length, seed=seed)
    whole = data.local(step, 0, 1).tolist()
    shares = [data.local(step, rank, world).tolist() for rank in range(world)]
    assert len(whole) == batch
    assert sorted(row for share in shares for row in share) == sorted(whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(row == list(range(row[0], row[0] + length + 1)) for row in whole)
    assert all(row[0] % length == 0 for row in whole)


@given(batch=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_an_epoch_has_every_sample_once(batch: int, seed: int) -> None:
    data = batches(batch=batch, seed=seed)
    count = data.sample_count
    seen = [
        row[0] for step in range(2 * count // batch + 2) for row in data.local(step, 0, 1).tolist()
    ]
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == list(range(0, 10 * count, 10))
    assert seen[:count] != seen[count : 2 * count]


def test_samples_have_the_predicted_tokens_and_one_before() -> None:
    assert batches().local(0, 0, 1).shape == (6, 11)


def test_a_rank_beyond_the_batch_has_an_empty_share() -> None:
    assert batches(batch=2).local(0, 2, 3).shape == (0, 11)


def test_too_short_a_corpus_is_refused() -> None:
    with pytest.raises(UsageError, match="1000 tokens are too few"):
        batches(length=1000)


def test_a_token_file_is_mapped_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(np.array([1, 2, 513], TOKEN_TYPE).tobytes())
    tokens = TokenFile(path=path, vocab_size=600, digest="").tokens()
    assert tokens.tolist() == [1, 2, 513]
    assert not tokens.flags.writeable

"""A token at a time, with what was seen kept, against the whole text at once."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.trainer.model.decoder import Decoder
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from tests.trainer.model.shapes import ALL

MODELS = {}
for name, shape in ALL.items():
    MODELS[name] = GPT(shape)
    initialize(MODELS[name], shape, 3, 0.3)


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_scores_are_those_of_the_whole_text_whatever_stands_beside_it(
    name: str, data: st.DataObject
) -> None:
    model = MODELS[name]
    length, words = model.config.seq_length, model.config.vocab_size
    ids = st.integers(0, words - 1)
    texts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=length), min_size=1, max_size=4))
    more = data.draw(st.integers(0, length - max(map(len, texts))))
    decoder = Decoder(model, texts, max(map(len, texts)) + more)
    for step in range(more + 1):
        for text, scores in zip(texts, decoder.scores, strict=True):
            with torch.no_grad():
                expected = model.logits(torch.tensor([text]))[0, -1]
            assert (scores - expected).abs().max() < 1e-3  # of some 7; 1e-5 is usual
        if step < more:
            new = data.draw(st.lists(ids, min_size=len(texts), max_size=len(texts)))
            texts = [[*text, token] for text, token in zip(texts, new, strict=True)]
            decoder.read(new)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_token_costs_one_position(name: str) -> None:
    model, widths = MODELS[name], list[int]()
    block = next(iter(model.blocks.values()))
    handle = block.mlp.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))  # type: ignore[union-attr]
    decoder = Decoder(model, [[1, 2, 3], [4]], 6)
    for token in (5, 6, 7):
        decoder.read([token, token])
    handle.remove()
    assert widths == [3, 1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(
    ("dtype", "far"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2), (torch.float16, 0.03)]
)
def test_a_gpu_says_what_a_cpu_says(name: str, dtype: torch.dtype, far: float) -> None:
    """Texts of different lengths, so that some have columns with nothing in them."""
    model = MODELS[name]
    texts = [[5, 6, 7, 8, 9], [1], [2, 3]]
    there = Decoder(deepcopy(model).to("cuda", dtype), texts, 9)
    here = Decoder(model, texts, 9)
    for token in (4, 3, 2, 1):
        found, expected = there.scores.float().cpu(), here.scores
        assert ((found - expected).abs().max() / expected.abs().max()) < far
        there.read([token] * 3)
        here.read([token] * 3)

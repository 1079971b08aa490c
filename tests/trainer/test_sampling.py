import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.data import tokenizers
from elastic.trainer.data.prepare import learn
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.sampling import Sampling, pieces, written

SHAPE = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=20)


def made() -> GPT:
    model = GPT(SHAPE)
    initialize(model, SHAPE, 1, 0.5)
    return model


def texts(prompts: list[list[int]], sampling: Sampling, count: int) -> list[list[int | None]]:
    steps = list(written(made(), prompts, sampling, max_new_tokens=count))
    return [list(one) for one in zip(*steps, strict=True)]


def test_a_text_is_the_same_whatever_texts_stand_beside_it() -> None:
    """Beyond the model's sequence, too, where each goes on from its newer half."""
    hot = Sampling(temperature=2.0, top_k=0, seed=5)
    short, long = [3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    both = texts([short, long], hot, 20)
    assert both[0] == texts([short], hot, 20)[0]
    assert both[1] == texts([long], Sampling(temperature=2.0, top_k=0, seed=6), 20)[0]
    assert both[1] == texts([long[-8:]], Sampling(temperature=2.0, top_k=0, seed=6), 20)[0]
    assert len(both[0]) == 20
    assert None not in both[0]


def test_the_likeliest_is_what_the_whole_text_says_step_by_step() -> None:
    model, text = made(), [3, 4]
    found = texts([text], Sampling(temperature=0), 20)[0]
    seen = list(text)
    for token in found:
        if len(seen) == SHAPE.seq_length + 1:  # full, so its newer half and the new token
            seen = seen[-SHAPE.seq_length // 2 :]
        with torch.no_grad():
            assert token == int(model.logits(torch.tensor([seen]))[0, -1].argmax())
        seen.append(int(token))


def test_a_model_that_sees_one_token_goes_on_from_it() -> None:
    shape = GPTConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=1, vocab_size=9
    )
    model = GPT(shape)
    initialize(model, shape, 1, 0.5)
    assert len(list(written(model, [[1, 2], [3]], Sampling(), max_new_tokens=3))) == 3


def test_one_candidate_or_no_temperature_is_the_likeliest_and_an_end_ends() -> None:
    model = made()
    with torch.no_grad():
        likeliest = int(model.logits(torch.tensor([[3]]))[0, -1].argmax())
    for one in (Sampling(top_k=1), Sampling(temperature=0), Sampling(top_p=1e-9, top_k=0)):
        assert texts([[3]], one, 1) == [[likeliest]]
    ends = frozenset({likeliest})
    cold = Sampling(temperature=0)
    assert list(written(model, [[3]], cold, max_new_tokens=9, ends=ends)) == [[likeliest]]


def test_a_text_that_has_ended_is_none_while_others_go_on() -> None:
    hot, prompts = Sampling(temperature=5.0, top_k=0), [[number] for number in range(8)]
    steps = list(written(made(), prompts, hot, max_new_tokens=30, ends=frozenset(range(4))))
    for text in zip(*steps, strict=True):
        ended = [n for n, token in enumerate(text) if token in range(4)]
        assert all(token is None for token in text[ended[0] + 1 :]) if ended else None not in text
    assert len({tuple(one).index(None) for one in zip(*steps, strict=True) if None in one}) > 1


@given(scores=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30), top_k=st.integers(0, 40),
       top_p=st.floats(0.01, 1), seed=st.integers(0, 9), temperature=st.floats(1e-300, 1e3))  # fmt: skip
def test_only_the_likely_are_drawn(
    scores: list[float], top_k: int, top_p: float, seed: int, temperature: float
) -> None:
    given_ = Sampling(top_k=top_k, top_p=top_p, temperature=temperature)
    drawn = given_.draw(torch.tensor(scores), torch.Generator().manual_seed(seed))
    better = [one for one in torch.tensor(scores).tolist() if one > torch.tensor(scores)[drawn]]
    assert not top_k or len(better) < top_k
    chances = (torch.tensor(scores).double() / temperature).softmax(0)
    if chances.isfinite().all() and not top_k:
        mass = sum(c for c, s in zip(chances.tolist(), scores, strict=True) if s > scores[drawn])
        assert mass < top_p + 1e-9


def test_what_is_drawn_is_as_likely_as_the_model_says() -> None:
    scores, generator = torch.tensor([0.0, 1.0, 2.0, 9.0]), torch.Generator().manual_seed(0)
    given_ = Sampling(temperature=2.0, top_k=0, vocabulary=3)  # the last only pads
    counts = Counter(given_.draw(scores, generator) for _ in range(4000))
    whole = sum(math.exp(one / 2) for one in range(3))
    for token in range(3):
        chance = math.exp(token / 2) / whole
        assert abs(counts[token] / 4000 - chance) < 5 * math.sqrt(chance / 4000)
    assert counts.total() == 4000 == sum(counts[token] for token in range(3))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 2.0},
     {"seed": -1}],
)  # fmt: skip
def test_what_cannot_be_drawn_by_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"^--{next(iter(wrong)).replace('_', '-')} "):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_weights_that_are_no_numbers_are_one_line() -> None:
    model = made()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(CheckpointError, match="inf or NaN"):
        next(written(model, [[1]], Sampling(), max_new_tokens=1))


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40),
    cut=st.integers(0, 20),
)
def test_a_text_that_comes_in_pieces_is_the_text(text: str, cut: int) -> None:
    """Whose letters are several tokens each, as nothing of them was learnt."""
    known = tokenizers.TextTokenizer(model=WORDS.model, end=None)
    (ids,) = known.encode([text + "."])
    before = known.decode(ids[:cut])
    told = "".join(pieces(known, ids[:cut], ids[cut:]))
    assert "\ufffd" not in told
    if not before.endswith("\ufffd"):  # the prompt ends within a letter
        assert before + told == (text + "." if cut < len(ids) else before)


WORDS = learn(["to be or not to be, that is the question"], 270)

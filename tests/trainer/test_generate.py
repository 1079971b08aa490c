import torch

from elastic.trainer.generate import sample
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize

SHAPE = GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=20)


def made() -> GPT:
    model = GPT(SHAPE)
    initialize(model, SHAPE, 1, 0.5)
    return model


def test_writes_beyond_the_models_sequence() -> None:
    prompt = torch.tensor([3, 4])
    written = sample(made(), prompt, max_new_tokens=10)
    assert written.shape == (12,)
    assert written[:2].tolist() == [3, 4]


def test_a_seed_repeats_itself_and_another_does_not() -> None:
    model, prompt = made(), torch.tensor([3])
    first, same, other = (
        sample(model, prompt, max_new_tokens=30, temperature=5.0, top_k=0, seed=seed).tolist()
        for seed in (1, 1, 2)
    )
    assert first == same != other


def test_one_candidate_or_no_temperature_is_the_likeliest_token() -> None:
    model, prompt = made(), torch.tensor([3])
    likeliest = int(model.logits(prompt[None])[0, -1].argmax())
    assert sample(model, prompt, max_new_tokens=1, top_k=1).tolist() == [3, likeliest]
    assert sample(model, prompt, max_new_tokens=1, temperature=0).tolist() == [3, likeliest]
    stopped = sample(model, prompt, max_new_tokens=9, temperature=0, stop_id=likeliest)
    assert stopped.tolist() == [3, likeliest]

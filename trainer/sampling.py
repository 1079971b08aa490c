"""Texts that a model goes on with: a token at a time, each drawn from what the model thinks likely.

Of a text longer than the model's sequence only its end is seen. One that gets that long while it is
written goes on from its newer half, which is read anew.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.data.tokenizers import Tokenizer
from elastic.trainer.model.decoder import Decoder
from elastic.trainer.model.gpt import GPT

_CONTEXT = 8
"""Tokens of a prompt that decide how the next is written: whether a space is in front."""
_HALF = "\ufffd"
"""What stands for bytes that are no letter, or not yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen among the model's scores."""

    temperature: float = 0.8
    """What scores are divided by; 0: always the likeliest."""
    top_k: int = 40
    """Only the k likeliest; 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together have that probability; 1: all."""
    seed: int = 0
    """Text i of a call draws from a generator of (seed + i), whatever other texts there are."""
    vocabulary: int | None = None
    """Ids from there on only pad the vocabulary, and are never drawn; None: there are none."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"--temperature {self.temperature}: it is 0 or above")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: it is 0 (all) or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: it is above 0, and at most 1 (all)")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: it is 0 or above, below 2^63")

    def draw(self, scores: Tensor, generator: torch.Generator) -> int:
        """One id, of scores [V] on the CPU."""
        scores = scores[: self.vocabulary].double()
        if self.temperature == 0:
            return int(scores.argmax())
        scores, ids = scores.topk(min(self.top_k or len(scores), len(scores)))
        chances = ((scores - scores[0]) / self.temperature).softmax(0)
        enough = chances.cumsum(0) - chances < self.top_p  # what is before one has less than that
        chances = chances * enough
        return int(ids[torch.multinomial(chances, 1, generator=generator)])


def written(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    ends: frozenset[int] = frozenset(),
) -> Iterator[list[int | None]]:
    """The next token of each text, step by step: None for a text that has ended with one of `ends`.

    prompts: ids of tokens, at least one each. Ends once all texts have, or are `max_new_tokens` longer.
    """
    length = model.config.seq_length
    texts = [list(prompt[-length:]) for prompt in prompts]
    room = min(length, max(map(len, texts)) + max_new_tokens)
    generators = [torch.Generator().manual_seed(sampling.seed + n) for n in range(len(texts))]
    over = [False] * len(texts)
    decoder = Decoder(model, texts, room)
    for left in reversed(range(max_new_tokens)):
        scores = decoder.scores.float().cpu()
        if not scores.isfinite().all():
            raise CheckpointError(
                "the model's scores are inf or NaN: so are its weights, or its dtype is too narrow"
            )
        drawn = [sampling.draw(*one) for one in zip(scores, generators, strict=True)]
        yield [None if done else token for done, token in zip(over, drawn, strict=True)]
        over = [done or token in ends for done, token in zip(over, drawn, strict=True)]
        if all(over) or not left:
            return
        full = max(map(len, texts)) == length
        newer = max(1, length // 2) - 1  # and the one that was drawn
        texts = [
            [*(text[len(text) - newer :] if len(text) == length else text), token]
            for text, token in zip(texts, drawn, strict=True)
        ]
        if full:
            decoder = Decoder(model, texts, min(length, max(map(len, texts)) + left))
        else:
            decoder.read(drawn)


def continue_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, sampling: Sampling, *, max_new_tokens: int
) -> str:
    """`prompt` and what the model makes of it, as text; an empty prompt starts a new document."""
    ids, ends = encoded(tokenizer, prompt), tokenizer.ends
    steps = written(model, [ids], sampling, max_new_tokens=max_new_tokens, ends=ends)
    tokens = (token for (token,) in steps if token is not None and token not in ends)
    return prompt + "".join(pieces(tokenizer, ids, tokens))


def encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A prompt's ids; of an empty one what ends a document, since the next begins behind it. Raises
    `UsageError` where the tokenizer has no such thing."""
    (ids,) = tokenizer.encode([prompt])
    return ids or [tokenizer.eod]


def pieces(tokenizer: Tokenizer, ids: Sequence[int], tokens: Iterable[int]) -> Iterator[str]:
    """Text of `tokens`, which follow `ids`, as they come: what is half a letter waits for the rest."""
    seen, before = list(ids[-_CONTEXT:]), len(ids[-_CONTEXT:])
    for token in tokens:
        seen.append(token)
        known, found = tokenizer.decode(seen[:before]), tokenizer.decode(seen)
        if len(found) > len(known) and not found.endswith(_HALF):
            yield found[len(known) :]
            seen, before = seen[before:], len(seen) - before

"""Write on from a prompt: `python -m elastic.trainer.generate --load DIR --prompt "def "`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from elastic.checkpoint import stored
from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.data import tokenizer
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT


@torch.no_grad()
def sample(
    model: GPT,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    stop_id: int | None = None,
) -> Tensor:
    """Continue `prompt`, [S0] int64 with S0 >= 1, by up to `max_new_tokens`; returns [S1] int64.

    Each token is drawn among the `top_k` likeliest (0: all) after dividing the scores by
    `temperature` (0: always the likeliest). Ends early after `stop_id`. Of a text longer than the
    model's sequence only the end is seen.
    """
    tokens = prompt
    generator = torch.Generator(device=prompt.device).manual_seed(seed)
    for _ in range(max_new_tokens):
        seen = tokens[-model.config.seq_length :]
        chosen = _draw(model.logits(seen[None])[0, -1], temperature, top_k, generator)
        tokens = torch.cat([tokens, chosen])
        if stop_id is not None and int(chosen) == stop_id:
            break
    return tokens


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """One token id, [1], from scores [V]."""
    if temperature == 0:
        return logits.argmax(keepdim=True)
    if 0 < top_k < logits.numel():
        worst_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < worst_kept, float("-inf"))
    probabilities = (logits.float() / temperature).softmax(dim=0)
    return torch.multinomial(probabilities, 1, generator=generator)


def continue_text(
    model: GPT,
    words: Tokenizer,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> str:
    """`prompt` and what the model makes of it, as text; an empty prompt starts a new document."""
    end = tokenizer.end_of_document_id(words)
    device = next(model.parameters()).device
    ids = torch.tensor(words.encode(prompt).ids or [end], dtype=torch.int64, device=device)
    written = sample(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_id=end,
    )
    return str(words.decode(written.tolist(), skip_special_tokens=True))


def load_model(directory: Path) -> GPT:
    """The model of the newest checkpoint in `directory`. Raises UsageError without one, and
    CheckpointError where it is damaged.
    """
    found: dict[str, Any] = {"identity": None}
    step = stored.load(directory, found)
    if not step:
        raise UsageError(f"{directory} holds no checkpoint")
    model = GPT(GPTConfig(**{name: found["identity"][name] for name in GPTConfig.__slots__}))
    stored.load(directory, {"model": model}, step=step)
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m elastic.trainer.generate", description=__doc__)
    parser.add_argument("--load", type=Path, required=True, help="what --save was in training")
    parser.add_argument("--prompt", default="def ", help="text to begin with")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    parser.add_argument("--top-k", type=int, default=40, help="0: all tokens")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        model, words = load_model(given.load), tokenizer.load(given.load)
    except (UsageError, CheckpointError, FileNotFoundError) as error:
        parser.error(str(error))
    text = continue_text(
        model,
        words,
        given.prompt,
        max_new_tokens=given.max_new_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
    )
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

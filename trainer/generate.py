"""`elasticctl generate`: text that a trained model goes on with."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.checkpoint.storage.protocol import folder
from elastic.proto.errors import UsageError
from elastic.proto.verbs import Context, Output, count, positive, text
from elastic.proto.visible import visible

if TYPE_CHECKING:  # what needs torch is imported once there is something to do
    import torch

    from elastic.trainer.checkpoints import Weights
    from elastic.trainer.data.tokenizers import Tokenizer
    from elastic.trainer.model.gpt import GPT
    from elastic.trainer.sampling import Sampling

MOST_SAMPLES = 1 << 16
"""Texts of a prompt."""


def generate(context: Context, argv: Sequence[str]) -> int:
    """Text that a trained model goes on with, from a checkpoint of any layout."""
    args = _arguments(argv)
    prompts = _prompts(args)

    from elastic.trainer.checkpoints import load_model
    from elastic.trainer.sampling import Sampling, encoded
    from elastic.trainer.watch import memory

    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed
    )
    device, dtype = _where(args)
    weights, ends = _opened(args)
    tokenizer = _tokenizer(args)
    ends |= tokenizer.ends
    sampling = _fitted(sampling, weights, tokenizer)
    ids = [encoded(tokenizer, prompt) for prompt in prompts]
    sees = weights.config.seq_length
    for number, one in enumerate(ids, 1):
        if len(one) > sees:
            context.out.note(
                f"prompt {number} has {len(one)} tokens, of which the model sees the last {sees}"
            )
    try:
        model = load_model(weights, device, dtype)
        texts = list(zip(prompts, ids, strict=True))
        _write(context.out, args, model, tokenizer, texts, sampling, ends)
    except (RuntimeError, MemoryError) as error:
        if not memory.ran_out(error):
            raise
        raise UsageError(
            f"the model does not fit on {device} in {dtype}: give another --device or --dtype, or fewer texts"
        ) from error
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="elasticctl generate", description=generate.__doc__)
    add = parser.add_argument
    add(
        "--load", required=True, metavar="DIR", type=text,
        help="the checkpoint's folder or URL, what --save was in training; or a folder of Hugging Face's",
    )  # fmt: skip
    add("--step", type=positive, metavar="N", help="which one (the newest)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--prompt", action="append", metavar="TEXT", type=text, help="what to go on with; may be repeated"
    )  # fmt: skip
    what.add_argument("--prompts", metavar="FILE", type=Path, help="one on each line")
    add("--max-new-tokens", type=positive, default=128, metavar="N", help="at most (128)")
    add(
        "--temperature", type=_scale, default=0.8, metavar="T", help="0: always the likeliest (0.8)"
    )
    add("--top-k", type=_long, default=40, metavar="K", help="of the K likeliest; 0: of all (40)")
    add("--top-p", type=_part, default=1.0, metavar="P", help="of those that together have P (1)")
    add("--seed", type=_long, default=0, metavar="N", help="decides what is drawn (0)")
    add("--num-samples", type=_few, default=1, metavar="N", help="texts of each prompt (1)")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (cuda where there is one)")
    add(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="of weights and arithmetic (bfloat16 on a GPU, float32 on a CPU)",
    )  # fmt: skip
    add("--tokenizer", metavar="DIR", help="folder with the tokenizer (that of --load)")
    return parser.parse_args(argv)


def _long(argument: str) -> int:
    if (number := count(argument)) >= 2**63:
        raise argparse.ArgumentTypeError(f"{argument} is more than 64 bits hold")
    return number


def _scale(argument: str) -> float:
    if not 0 <= (number := _number(argument)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{argument} is not 0 or above")
    return number


def _part(argument: str) -> float:
    if not 0 < (number := _number(argument)) <= 1:
        raise argparse.ArgumentTypeError(f"{argument} is not above 0 and at most 1")
    return number


def _number(argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{argument!r} is no number") from None


def _few(argument: str) -> int:
    if (number := positive(argument)) > MOST_SAMPLES:
        raise argparse.ArgumentTypeError(f"{argument} is more than {MOST_SAMPLES}")
    return number


def _prompts(args: argparse.Namespace) -> list[str]:
    """Each as often as it is asked for."""
    if args.prompts is None:
        found = args.prompt
    else:
        try:
            text = args.prompts.read_text(encoding="utf-8")
            lines = text.removesuffix("\n").split("\n") if text else []
            found = [line.removesuffix("\r") for line in lines]
        except UnicodeDecodeError as error:
            raise UsageError(f"{args.prompts} is no text in UTF-8") from error
        if not found:
            raise UsageError(f"{args.prompts} is empty: write a prompt on each line")
    return [one for one in found for _ in range(args.num_samples)]


def _where(args: argparse.Namespace) -> "tuple[torch.device, torch.dtype]":
    import torch

    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {args.device}: {str(error).splitlines()[0]}") from error
    name = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    return device, getattr(torch, name)


def _opened(args: argparse.Namespace) -> "tuple[Weights, frozenset[int]]":
    """The model, and the ids that end a text by its own word."""
    from elastic.trainer import checkpoints
    from elastic.trainer.convert import reading

    home = folder(args.load)
    if home is None or not (home / reading.CONFIG).is_file():
        return checkpoints.opened(args.load, args.step), frozenset()
    if args.step is not None:
        raise UsageError(f"--step {args.step}: {home} is a folder of Hugging Face's, without steps")
    weights, settings = reading.read(home)
    told = settings.get("eos_token_id")
    ends = told if isinstance(told, list) else [told]
    return weights, frozenset(one for one in ends if isinstance(one, int))


def _tokenizer(args: argparse.Namespace) -> "Tokenizer":
    from elastic.trainer.data import tokenizers

    where = args.tokenizer or args.load
    home = folder(where)
    if home is None:
        raise UsageError(f"{where} is no folder: give --tokenizer one that has the tokenizer")
    try:
        return tokenizers.load(home)
    except UsageError as error:
        if args.tokenizer is not None:
            raise
        raise UsageError(
            f"{error}; where the tokenizer lies elsewhere, give --tokenizer"
        ) from error


def _fitted(sampling: "Sampling", weights: "Weights", tokenizer: "Tokenizer") -> "Sampling":
    """Among the words that there are."""
    from dataclasses import replace

    size, has = tokenizer.vocab_size, weights.config.vocab_size
    if size > has:
        raise UsageError(
            f"the tokenizer has {size} words and the model {has}: it is another model's"
        )
    return replace(sampling, vocabulary=size)


def _write(
    out: Output,
    args: argparse.Namespace,
    model: "GPT",
    tokenizer: "Tokenizer",
    prompts: Sequence[tuple[str, list[int]]],
    sampling: "Sampling",
    ends: frozenset[int],
) -> None:
    """One text as it comes; several once all are there."""
    from elastic.trainer.sampling import pieces, written

    steps = written(
        model, [ids for _, ids in prompts], sampling, max_new_tokens=args.max_new_tokens, ends=ends
    )
    if len(prompts) == 1 and not out.json:
        ((prompt, ids),) = prompts
        out.raw(visible(prompt).encode())
        tokens = (token for (token,) in steps if token is not None and token not in ends)
        for piece in pieces(tokenizer, ids, tokens):
            out.raw(visible(piece).encode())
        out.raw(b"\n")
        return
    new: list[list[int]] = [[] for _ in prompts]
    for step in steps:
        for mine, token in zip(new, step, strict=True):
            mine += [] if token is None else [token]
    for number, ((prompt, ids), mine) in enumerate(zip(prompts, new, strict=True)):
        told = "".join(pieces(tokenizer, ids, [one for one in mine if one not in ends]))
        if out.json:
            document = {
                "prompt": prompt, "sample": number % args.num_samples, "text": told,
                "prompt_tokens": len(ids), "tokens": mine, "ended": bool(mine) and mine[-1] in ends,
            }  # fmt: skip
            out.document(document, line=True)
        else:
            out.text(f"{'' if not number else chr(10)}=== {number + 1} of {len(prompts)}")
            out.text(prompt + told)

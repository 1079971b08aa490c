"""`elasticctl hf`: a trained model to Hugging Face's folder, and such a folder to a checkpoint."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from elastic.checkpoint.storage.protocol import canonical, folder
from elastic.proto.errors import UsageError
from elastic.proto.verbs import Context, Output, of_verbs, positive

DTYPES = ("float32", "bfloat16", "float16")
SHARD = "5GB"
MOST_DIVISOR = 1 << 16


def hf(context: Context, argv: Sequence[str]) -> int:
    """Models to and from Hugging Face: export, import."""
    parser = argparse.ArgumentParser(prog="elasticctl hf", description=hf.__doc__)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _add_export(verbs.add_parser("export", help=_export.__doc__, description=_export.__doc__))
    _add_import(verbs.add_parser("import", help=_import.__doc__, description=_import.__doc__))
    args = of_verbs(parser, argv)
    return int(args.verb(context.out, args))


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", help="the checkpoint's folder or URL: what --save was")
    add("dest", metavar="DEST", type=Path, help="a folder to be made")
    add("--step", type=positive, metavar="N", help="which one (the newest)")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights (float32, as trained)")
    add("--tokenizer", type=Path, metavar="DIR", help="folder with the tokenizer's files (PATH)")
    add(
        "--vocab-size", type=positive, metavar="N",
        help="words that are kept, without those that pad (the tokenizer's; without one, all)",
    )  # fmt: skip
    add("--max-shard-size", default=SHARD, metavar="SIZE", help=f"of a file, at most ({SHARD})")
    parser.set_defaults(verb=_export, parser=parser)


def _add_import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", type=Path, help="a folder that save_pretrained wrote")
    add("dest", metavar="DEST", help="a folder to be made, or a URL: --load with --finetune")
    add("--step", type=positive, default=1, metavar="N", help="which it is to be (1)")
    add(
        "--seq-length",
        type=positive,
        metavar="N",
        help="of the samples to train on (all positions)",
    )
    add(
        "--make-vocab-size-divisible-by", type=_divisor, default=128, metavar="N", dest="divisible_by",
        help="words are made up until this divides them (128, as in training)",
    )  # fmt: skip
    parser.set_defaults(verb=_import, parser=parser)


def _divisor(argument: str) -> int:
    found = positive(argument)
    if found > MOST_DIVISOR:
        raise argparse.ArgumentTypeError(f"{found} would make up more words than there are")
    return found


def _export(out: Output, args: argparse.Namespace) -> int:
    """Make a folder that transformers loads, of a checkpoint of the trainer's in any layout."""
    import torch  # takes its time, and a usage error need not wait for it

    from elastic.trainer import checkpoints
    from elastic.trainer.convert import writing
    from elastic.trainer.data import tokenizers

    most = _bytes(args.max_shard_size)
    weights = checkpoints.opened(args.path, args.step)
    home = args.tokenizer or folder(args.path)
    files = writing.tokenizer_files(home) if home else []
    found = tokenizers.load(home) if home and (files or args.tokenizer) else None
    kept = args.vocab_size or (found.vocab_size if found else weights.config.vocab_size)
    if found and kept < found.vocab_size:
        raise UsageError(
            f"--vocab-size {kept} would cut words off that the tokenizer in {home} has: it has "
            f"{found.vocab_size}; leave --vocab-size out"
        )
    if kept > weights.config.vocab_size:
        raise UsageError(
            f"the model has {weights.config.vocab_size} words, and the tokenizer or --vocab-size {kept}"
        )
    count = writing.write(
        weights, args.dest, vocabulary=kept, dtype=getattr(torch, args.dtype),
        tokenizer=found, files=files, shard_bytes=most,
    )  # fmt: skip
    parameters = weights.config.parameter_count
    message = f"step {weights.step}, {parameters:,} parameters, words: {kept}, files: {count}"
    if found is None:
        out.note(f"{args.path} has no tokenizer: without one the folder has the weights alone")
    elif not isinstance(found, tokenizers.TextTokenizer):
        out.note("NullTokenizer is known to elasticctl generate alone: transformers has none such")
    return _done(out, str(args.dest), message)


def _import(out: Output, args: argparse.Namespace) -> int:
    """Make a checkpoint that training and `generate` start from, of a folder with safetensors."""
    from elastic.checkpoint.storage.connect import connect
    from elastic.checkpoint.tools import inspection
    from elastic.trainer import checkpoints
    from elastic.trainer.convert import reading, writing
    from elastic.trainer.data import tokenizers

    inspection.vacant(connect(canonical(args.dest)))
    weights, _ = reading.read(args.path, divisible_by=args.divisible_by, seq_length=args.seq_length)
    tokenizer = writing.tokenizer_files(args.path)
    if any(file.name == tokenizers.MODEL_NAME for file in tokenizer):
        tokenizers.load(args.path)  # what comes along is one
    if home := folder(args.dest):
        home.mkdir(parents=True, exist_ok=True)
        writing.copy(tokenizer, home)  # before there is a step, which is of no use without
    elif tokenizer:
        out.note(f"the tokenizer stays in {args.path}: {args.dest} is no folder")
    checkpoints.save_model(args.dest, weights, step=args.step)
    config = weights.config
    message = (
        f"step {args.step}, {config.parameter_count:,} parameters, words: {weights.vocabulary}, padded to "
        f"{config.vocab_size}"
    )
    return _done(out, args.dest, message)


def _done(out: Output, path: str, message: str) -> int:
    if out.json:
        out.document({"path": path, "message": message})
    else:
        out.text(f"{path}: {message}")
    return 0


def _bytes(argument: str) -> int:
    """5GB, 500MB: powers of 1000, as transformers has them. Raises `UsageError`."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        count = argument.upper().removesuffix(unit)
        if argument.upper().endswith(unit) and count.isdecimal() and int(count):
            return int(count) * factor
    raise UsageError(f"--max-shard-size {argument}: write 5GB, 500MB or 100KB")

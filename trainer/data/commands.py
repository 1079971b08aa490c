"""`elasticctl data`: text to Megatron's indexed files, several of these to one, and what is in one. Asks no
job."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.proto.errors import UsageError
from elastic.proto.verbs import Context, Output, count, of_verbs
from elastic.trainer.arguments.data import TOKENIZER_TYPES, TokenizerFlags
from elastic.trainer.extra import extra

if TYPE_CHECKING:  # what these import takes its time, and --help needs none of it
    from elastic.trainer.data.preprocess import Done
    from elastic.trainer.data.tokenizers import Tokenizer

WITHOUT_EFFECT = ("--chunk-size", "--partitions", "--keep-newlines", "--lang")
"""Flags of Megatron's tool that change nothing here."""
MOST_WORKERS = 1024
WIDEST = 60
"""Letters of a document in a table."""


def data(context: Context, argv: Sequence[str]) -> int:
    """Data to train on: preprocess, merge, inspect."""
    parser = argparse.ArgumentParser(prog="elasticctl data", description=data.__doc__)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb, add in (
        (_preprocess, _add_preprocess),
        (_merge, _add_merge),
        (_inspect, _add_inspect),
    ):
        assert verb.__doc__ is not None
        name = verb.__name__.strip("_")
        inner = verbs.add_parser(
            name, help=verb.__doc__, description=verb.__doc__, allow_abbrev=False
        )
        inner.set_defaults(verb=verb, parser=inner)
        add(inner)
    args = of_verbs(parser, argv)
    return int(args.verb(context.out, args))


def _add_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tokenizer-type", metavar="TYPE", help=f"{', '.join(TOKENIZER_TYPES)} (by the files)")
    add("--vocab-file", "--vocab", type=Path, metavar="FILE", help="vocab.json of GPT-2")
    add("--merge-file", type=Path, metavar="FILE", help="merges.txt of GPT-2")
    add("--tokenizer-model", type=Path, metavar="PATH", help="a tokenizer.json, or its folder")
    add("--vocab-size", type=int, metavar="N", help="of NullTokenizer")


def _tokenizer_flags(args: argparse.Namespace) -> TokenizerFlags:
    return TokenizerFlags(
        tokenizer_type=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
    )


def _prefix(argument: str) -> str:
    """With a name in it: a variable that is not set makes files that have none."""
    if os.path.basename(argument).strip() in ("", ".", ".."):
        raise argparse.ArgumentTypeError(f"{argument!r} has no name in it: write FOLDER/NAME")
    return argument


def _check_apart(prefixes: Sequence[str], inputs: Sequence[Path]) -> None:
    """Raises `UsageError` where a file of what is made is one that is read, which would be lost."""
    from elastic.trainer.data.indexed import paths

    read = {path.resolve() for path in inputs}
    for prefix in prefixes:
        for path in paths(prefix):
            if path.resolve() in read:
                raise UsageError(
                    f"{path} would be written over, and is read: give another --output-prefix"
                )


# --- preprocess ----------------------------------------------------------------------------------


def _add_preprocess(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input", nargs="+", action="extend", required=True, metavar="PATH",
        help="files of loose JSON, one document a line, gzip and bzip2 too; folders with such files; - is standard "
        "input",
    )  # fmt: skip
    add("--json-keys", nargs="+", action="extend", metavar="KEY", help="of the texts (text)")
    add(
        "--output-prefix", type=_prefix, required=True, metavar="PREFIX",
        help="of PREFIX_KEY_document.{bin,idx}",
    )  # fmt: skip
    _add_tokenizer(parser)
    add("--append-eod", action="store_true", help="end each document with the end of document")
    add(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="processes that encode (as many as processors)",
    )  # fmt: skip
    add("--log-interval", type=int, default=1000, metavar="N", help="documents between lines")
    add("--dataset-impl", default="mmap", metavar="mmap", help="there is no other")
    add("--split-sentences", action="store_true", help="is refused: documents stay whole")
    for flag in WITHOUT_EFFECT:
        nargs: dict[str, Any] = (
            {"action": "store_true", "default": None} if flag == "--keep-newlines" else {}
        )
        add(flag, help="of Megatron's tool, without effect here", **nargs)


def _preprocess(out: Output, args: argparse.Namespace) -> int:
    """Make Megatron's .bin and .idx of loose JSON."""
    if args.split_sentences:
        args.parser.error("--split-sentences: documents stay whole; leave it out")
    if args.dataset_impl != "mmap":
        args.parser.error(f"--dataset-impl {args.dataset_impl}: there is mmap")
    if args.workers < 1 or args.log_interval < 1:
        args.parser.error("--workers and --log-interval are at least 1")
    if args.workers > MOST_WORKERS:
        args.parser.error(f"--workers {args.workers}: {MOST_WORKERS} at most")
    for flag in WITHOUT_EFFECT:
        if getattr(args, flag[2:].replace("-", "_")) is not None:
            out.note(f"{flag} is of Megatron's tool, and has no effect here")
    with extra():
        from elastic.trainer.data import lines
        from elastic.trainer.data.encoding import Settings
        from elastic.trainer.data.preprocess import outputs, preprocess

    settings = Settings(
        tokenizer=_tokenizer_flags(args), keys=tuple(args.json_keys or ["text"]), append_eod=args.append_eod,
    )  # fmt: skip
    if len(set(settings.keys)) < len(settings.keys):
        args.parser.error("--json-keys: each only once")
    inputs = lines.files(args.input)
    names = outputs(args.output_prefix, settings.keys)
    _check_apart(names, inputs)
    began = time.monotonic()
    with _progress(lines.size(inputs), args.log_interval, out) as told:
        done = preprocess(inputs, args.output_prefix, settings, workers=args.workers, told=told)
    seconds = time.monotonic() - began
    if out.json:
        out.document(
            {
                "prefixes": names,
                "documents": done.documents,
                "tokens": done.tokens,
                "bytes": done.text,
                "seconds": seconds,
            }
        )
    else:
        out.text(f"{', '.join(names)}: {done.tokens} tokens; {_rate(done, seconds)}")
    return 0


def _rate(done: "Done", seconds: float) -> str:
    """Megatron's words for it."""
    return (
        f"Processed {done.documents} documents ({done.documents / seconds:.1f} docs/s, "
        f"{done.text / seconds / 1e6:.2f} MB/s)."
    )


@contextmanager
def _progress(size: int, interval: int, out: Output) -> Iterator[Callable[["Done"], None]]:
    """A bar where there is a terminal, else a line every `interval` documents."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    began = time.monotonic()
    if not console.is_terminal:
        said = 0

        def line(done: "Done") -> None:
            nonlocal said
            if done.documents // interval > said:
                said = done.documents // interval
                out.note(_rate(done, time.monotonic() - began))

        yield line
        return
    columns = (
        BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=size)

        def show(done: "Done") -> None:
            rate = _rate(done, time.monotonic() - began)
            bar.update(task, completed=done.read, description=rate)

        yield show


# --- merge ---------------------------------------------------------------------------------------


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--input", required=True, type=Path, metavar="DIR", help="folder of .bin and .idx files"
    )
    parser.add_argument(
        "--output-prefix", type=_prefix, required=True, metavar="PREFIX", help="of what is made"
    )


def _merge(out: Output, args: argparse.Namespace) -> int:
    """Make one dataset of all that are in a folder, by name."""
    from elastic.trainer.data.indexed import Indexed, merge, paths

    if not args.input.is_dir():
        raise UsageError(f"--input {args.input} is no folder")
    found = {
        path.with_suffix("") for path in args.input.iterdir() if path.suffix in (".bin", ".idx")
    }
    target = Path(args.output_prefix)
    _check_apart([str(target)], [path for prefix in found for path in paths(prefix)])
    for prefix in sorted(found):
        for path in paths(prefix):
            if not path.is_file():
                raise UsageError(f"{path} is missing, so {prefix} cannot be merged")
    merge(sorted(found), target)
    made = Indexed(target)
    told = {"prefix": str(target), "merged": len(found), "documents": len(made.documents) - 1}
    if out.json:
        out.document(told)
    else:
        out.text(f"{target}: {told['documents']} documents of {len(found)} datasets")
    return 0


# --- inspect -------------------------------------------------------------------------------------


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prefix", metavar="PREFIX", help="of a .bin and an .idx")
    parser.add_argument(
        "--documents", type=count, default=5, metavar="N", help="that are shown (5)"
    )
    _add_tokenizer(parser)


def _inspect(out: Output, args: argparse.Namespace) -> int:
    """What is in a dataset: sizes, and its first documents; as text with a tokenizer."""
    from elastic.trainer.data.indexed import Indexed

    found = Indexed(args.prefix)
    lengths = found.lengths
    sequences = len(found)
    told: dict[str, Any] = {
        "prefix": args.prefix,
        "dtype": found.dtype.name,
        "documents": len(found.documents) - 1,
        "empty_documents": int((found.documents[1:] == found.documents[:-1]).sum()),
        "sequences": sequences,
        "tokens": int(lengths.sum(dtype="int64")),
        "shortest": int(lengths.min()) if sequences else 0,
        "longest": int(lengths.max()) if sequences else 0,
    }
    tokenizer = _tokenizer(args)
    shown = []
    for number in range(min(args.documents, told["documents"])):
        first, last = found.documents[number : number + 2].tolist()
        ids = [int(one) for k in range(first, last) for one in found.tokens(k)]
        one: dict[str, Any] = {"document": number, "tokens": ids}
        shown.append(one | ({"text": tokenizer.decode(ids)} if tokenizer else {}))
    most = max((id_ for one in shown for id_ in one["tokens"]), default=0)
    if tokenizer and most >= tokenizer.vocab_size:
        out.note(
            f"token id {most} is not below the tokenizer's {tokenizer.vocab_size}: these are another tokenizer's, and "
            "the text is not what was preprocessed"
        )
    if out.json:
        out.document(told | {"shown": shown})
        return 0
    out.table(
        ("WHAT", "IS"), [(name.replace("_", " "), str(value)) for name, value in told.items()]
    )
    out.text("")
    rows = [
        (str(one["document"]), str(len(one["tokens"])), _short(one.get("text", str(one["tokens"]))))
        for one in shown
    ]
    out.table(("DOCUMENT", "TOKENS", "IS"), rows)
    return 0


def _tokenizer(args: argparse.Namespace) -> "Tokenizer | None":
    """What the flags mean, if there are any."""
    flags = _tokenizer_flags(args)
    if not flags.given:
        return None
    with extra():
        from elastic.trainer.data.tokenizers import build

    return build(flags)


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"

"""`elasticctl ckpt`: look at checkpoints on storage, verify them, convert them. Asks no job."""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from elastic.checkpoint.state.image import SIZES
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import Storage, canonical, words
from elastic.checkpoint.tools import inspection
from elastic.checkpoint.tools.inspection import Step, Tensor, ranks
from elastic.proto.errors import CheckpointError, NotFound
from elastic.proto.manifest import MOST_STEP
from elastic.proto.verbs import Context, Output, age, count, of_verbs

WIDEST = 60
"""Letters of a value in a table."""


def ckpt(context: Context, argv: Sequence[str]) -> int:
    """Checkpoints on storage: ls, show, verify, convert."""
    parser = argparse.ArgumentParser(prog="elasticctl ckpt", description=ckpt.__doc__)
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb, add in ((_ls, None), (_show, _add_show), (_verify, _add_step), (_convert, _add_to)):
        assert verb.__doc__ is not None
        name = verb.__name__.strip("_")
        inner = verbs.add_parser(name, help=verb.__doc__, description=verb.__doc__)
        inner.set_defaults(verb=verb, parser=inner)
        inner.add_argument(
            "path", metavar="PATH", type=_path, help="the checkpoint's folder or URL"
        )
        inner.add_argument(
            "--storage-options", type=_options, default={}, metavar="JSON|@FILE",
            help="of a URL, what its driver is given: '{\"endpoint_url\": \"http://127.0.0.1:9000\"}', or "
            "a file that has it, since others see a command line",
        )  # fmt: skip
        if add is not None:
            add(inner)
    args = of_verbs(parser, argv)
    return int(args.verb(context.out, args))


def _path(argument: str) -> str:
    if not argument:  # an unset variable
        raise argparse.ArgumentTypeError("it is empty")
    return canonical(argument)


def _options(argument: str) -> dict[str, Any]:
    try:
        if argument.startswith("@"):
            argument = Path(argument[1:]).read_text()
        given = json.loads(argument)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except ValueError:  # which would repeat it, and there may be a secret in it
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError('it is no JSON object: {"name": "value"}')
    return given


def _storage(args: argparse.Namespace) -> Storage:
    return connect(args.path, json.dumps(args.storage_options))


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """What goes wrong within with that storage is one line that names it."""
    try:
        yield
    except OSError as error:
        if error.filename:
            raise
        raise CheckpointError(f"{url}: {words(error)}") from error


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--step", type=count, metavar="N", help="which one (the newest)")


def _add_show(parser: argparse.ArgumentParser) -> None:
    _add_step(parser)
    parser.add_argument(
        "--only", default="", metavar="NAME", help="what is under that name (model.blocks.0)"
    )


def _add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dest", metavar="DEST", type=_path, help="a folder to be made")
    parser.add_argument(
        "--to", choices=("safetensors", "dcp", "elastic"), required=True,
        help="one set as Hugging Face has it; torch's DCP; ours, from a folder of DCP",
    )  # fmt: skip
    parser.add_argument(
        "--step", type=count, metavar="N",
        help="which one (the newest); with --to elastic, which it is to be",
    )  # fmt: skip
    parser.add_argument(
        "--only", default="", metavar="NAME",
        help="with --to safetensors, what is under that name (model), without it in front",
    )  # fmt: skip


# --- ls and show ---------------------------------------------------------------------------------


def _ls(out: Output, args: argparse.Namespace) -> int:
    """The steps that there are."""
    with _named(args.path):
        there = inspection.steps(_storage(args))
    if out.json:
        out.document({"path": args.path, "steps": [_document(step) for step in there]})
        return 0
    _table(out, there)
    for step in there:
        if step.problem:
            out.note(f"step {step.step}: {step.problem}")
    return 0


def _table(out: Output, there: Sequence[Step]) -> None:
    columns = ("STEP", "SEQUENCE", "WORLD", "BYTES", "AGE", "JOB", "COMMITTED")
    out.table(columns, [_row(step, time.time()) for step in there])


def _row(step: Step, now: float) -> tuple[str, ...]:
    told, since = step.manifest, "-" if step.time is None else age(now - step.time)
    if told is None:
        return str(step.step), "-", "-", "-", since, "-", "damaged" if step.problem else "no"
    return (
        str(step.step), str(told.sequence), str(told.world_size), _size(_bytes(step)), since,
        told.job[:8], "newest" if step.newest else "yes",
    )  # fmt: skip


def _document(step: Step) -> dict[str, Any]:
    told = step.manifest
    return {
        "step": step.step,
        "committed": told is not None,
        "newest": step.newest,
        "sequence": told and told.sequence,
        "round": told and told.round,
        "world_size": told and told.world_size,
        "bytes": told and _bytes(step),
        "time": step.time,
        "job": told and told.job,
        "problem": step.problem,
    }


def _bytes(step: Step) -> int:
    return sum(shard.bytes for shard in step.manifest.shards) if step.manifest else 0


def _size(number: float) -> str:
    """11.5GB"""
    unit = 0
    while number >= 999.95 and unit < 5:
        number, unit = number / 1000, unit + 1
    return f"{number:.1f}{('kB', 'MB', 'GB', 'TB', 'PB')[unit - 1]}" if unit else f"{number:.0f}B"


def _show(out: Output, args: argparse.Namespace) -> int:
    """What is in a step: its tensors and its values."""
    storage = _storage(args)
    with _named(args.path):
        step = inspection.pick(storage, args.step)
        assert step.manifest is not None
        found = inspection.contents(storage, step.manifest)
    tensors = [one for name, one in sorted(found.tensors.items()) if _under(name, args.only)]
    values = [one for one in found.values.values() if _under(one.name, args.only)]
    values.sort(key=lambda value: (value.name, value.ranks))
    if args.only and not tensors and not values:
        raise NotFound(f"step {step.step} in {args.path} has nothing under {args.only}")
    _say_passed_over(out, step)
    if out.json:
        listed = [
            {"name": t.name, "dtype": t.dtype, "shape": t.shape, "ranks": t.ranks, "tie": t.tie}
            for t in tensors
        ]
        more = [{"name": v.name, "value": v.value, "ranks": v.ranks} for v in values]
        parts = [
            {"name": name, "tensors": count, "elements": elements, "bytes": nbytes}
            for name, count, elements, nbytes in _parts(tensors)
        ]
        out.document(
            _document(step)
            | {"passed_over": step.passed_over, "parts": parts, "tensors": listed, "values": more}
        )
    else:
        _table(out, [step])
        out.text("")
        out.table(
            ("PART", "TENSORS", "ELEMENTS", "BYTES"),
            [(name, str(n), f"{many:,}", _size(size)) for name, n, many, size in _parts(tensors)],
        )
        out.text("")
        rows = [
            (
                t.name, t.dtype, str(list(t.shape)), ranks(t.ranks),
                f"is {t.tie}" if t.tie else _size(math.prod(t.shape) * SIZES[t.dtype]),
            )
            for t in tensors
        ]  # fmt: skip
        out.table(("TENSOR", "DTYPE", "SHAPE", "RANKS", "BYTES"), rows)
        out.text("")
        out.table(
            ("VALUE", "RANKS", "IS"), [(v.name, ranks(v.ranks), _short(v.value)) for v in values]
        )
    for problem in found.problems:
        out.note(problem)
    return 1 if found.problems else 0


def _under(name: str, only: str) -> bool:
    return not only or name == only or name.startswith((f"{only}.", f"{only}["))


def _parts(tensors: Sequence[Tensor]) -> list[tuple[str, int, int, int]]:
    """Of what the state has at its top: name, tensors, their elements and bytes; what is tied is once."""
    found: dict[str, tuple[int, int, int]] = {}
    for one in tensors:
        name = one.name.partition(".")[0]
        count, elements, nbytes = found.get(name, (0, 0, 0))
        if not one.tie:
            many = math.prod(one.shape)
            found[name] = count + 1, elements + many, nbytes + many * SIZES[one.dtype]
    return [(name, *numbers) for name, numbers in found.items()]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"


# --- verify and convert --------------------------------------------------------------------------


def _verify(out: Output, args: argparse.Namespace) -> int:
    """Whether every byte of a step is what was written; the exit code is 1 where one is not."""
    storage = _storage(args)
    with _named(args.path):
        step = inspection.pick(storage, args.step)
        assert step.manifest is not None
        damaged = inspection.verify(storage, step.manifest)
    _say_passed_over(out, step)
    if out.json:
        listed = [{"file": d.file, "what": d.what, "problem": d.problem} for d in damaged]
        out.document(_document(step) | {"passed_over": step.passed_over, "damaged": listed})
    elif damaged:
        out.table(
            ("FILE", "WHAT", "PROBLEM"), [(d.file, d.what or "-", d.problem) for d in damaged]
        )
    else:
        out.text(
            f"step {step.step}, {_size(_bytes(step))}, files: {len(step.manifest.shards)}: all as it was "
            "written"
        )
    return 1 if damaged or step.passed_over else 0


def _say_passed_over(out: Output, step: Step) -> None:
    for complaint in step.passed_over:
        out.note(complaint)


def _convert(out: Output, args: argparse.Namespace) -> int:
    """Make a step one set of safetensors files, or a folder of DCP; or a step of such a folder."""
    if args.only and args.to != "safetensors":
        args.parser.error("--only goes with --to safetensors")
    if args.to == "elastic" and args.step is None:
        args.parser.error("--to elastic makes a step: say which, --step N")
    if args.to == "elastic" and not 1 <= args.step <= MOST_STEP:
        args.parser.error(f"--step: steps are counted from 1, up to {MOST_STEP}")
    from elastic.checkpoint.tools import (
        convert,  # torch takes its time, and the other verbs need none
    )

    options = args.storage_options
    with _named(args.dest if args.to == "elastic" else args.path):
        if args.to == "elastic":
            made = convert.from_dcp(args.path, args.dest, args.step, options)
        else:
            step = inspection.pick(_storage(args), args.step)
            _say_passed_over(out, step)
            if args.to == "dcp":
                made = convert.to_dcp(args.path, step.step, args.dest, options)
            else:
                made = convert.to_safetensors(args.path, step.step, args.dest, args.only, options)
    if out.json:
        out.document({"path": args.dest, "message": made})
    else:
        out.text(f"{args.dest}: {made}")
    return 0

"""Command-line options from the fields of dataclasses: a field's name, type, default and doc string are the
option's, so that nothing is written twice.

A field `seq_length: int` is `--seq-length N`. A bool is `--flag`, `--flag true` or `--flag false`, and one
that is True by default is turned off by `--no-flag`, too. `Literal` gives the choices, a tuple takes
several words, `| None` is "not given", and what has no default has to be given.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from elastic.proto.errors import UsageError
from elastic.trainer.arguments import refused


def spelled(
    default: Any = MISSING,
    *also: str,
    off: Sequence[str] = (),
    meaning: Mapping[str, Any] | None = None,
) -> Any:
    """A field whose option has more than its name.

    also: other names of it; off: flags that set a bool to False, in place of `--no-...`; meaning: flags
    that stand for a value of it.
    """
    extra = {"also": also, "off": tuple(off), "meaning": dict(meaning or {})}
    return field(default=default, metadata=extra)


class Parser(argparse.ArgumentParser):
    """Whose errors are `UsageError`, for whoever called to say."""

    def error(self, message: str) -> NoReturn:
        flags, _, rest = message.removeprefix("argument ").partition(": invalid choice: '")
        value, named, _ = rest.partition("'")
        if named and (said := refused.of_value(flags.split("/")[0], value)):
            raise UsageError(said)
        raise UsageError(message.removeprefix("argument "))


class _Stands(argparse.Action):
    """A flag that stands for a value of another; `--flag false` does nothing."""

    def __init__(self, *, stands_for: Any, **rest: Any) -> None:
        super().__init__(**SWITCH, **rest)
        self._value = stands_for

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values:
            setattr(namespace, self.dest, self._value)


def add(group: Any, subject: type, *, but: Collection[str] = ()) -> None:
    """Options for the fields of the dataclass `subject`; those not given are not in the namespace.

    but: fields that another subject has, too, and that have their option.
    """
    docs, types = doc_strings(subject), get_type_hints(subject)
    for one in fields(subject):
        if one.name not in but:
            doc = docs.get(one.name, "")
            for other in types:  # fields that it names are arguments to whoever reads it
                doc = doc.replace(f"`{other}`", flag_of(other))
            _add_field(group, one, types[one.name], doc)


def check_agree(subjects: Iterable[type], words: Sequence[str]) -> None:
    """Raises `UsageError` where words of one source give an argument, and a flag that stands for another value of
    it: the later one would win without a word."""
    parser = Parser(add_help=False, allow_abbrev=False)
    for subject in subjects:
        types = get_type_hints(subject)
        for one in fields(subject):
            if one.metadata.get("meaning"):
                _add_field(parser, one, types[one.name], "")
    said: dict[str, dict[str, Any]] = {}
    for flag, action in parser._option_string_actions.items():
        for place, word in enumerate(words):
            if word.partition("=")[0] == flag:
                value = [one for one in words[place + 1 : place + 2] if not one.startswith("--")]
                found = vars(parser.parse_known_args([word, *value])[0])
                if action.dest in found:  # else --flag false
                    said.setdefault(action.dest, {})[flag] = found[action.dest]
    for given in said.values():
        (flag, value), *others = given.items()
        for other, instead in others:
            if value != instead:
                raise UsageError(
                    f"{flag} asks for {value} and {other} for {instead}: give one of them"
                )


def check_once(subjects: Iterable[type], words: Sequence[str]) -> None:
    """Raises `UsageError` where words of one source give a list twice: the later one would win without a word."""
    lists: dict[str, str] = {}
    for subject in subjects:
        types = get_type_hints(subject)
        for one in fields(subject):
            if get_origin(_without_none(types[one.name])) is tuple:
                flags = (flag_of(one.name), *one.metadata.get("also", ()))
                lists |= dict.fromkeys(flags, one.name)
    seen: set[str] = set()
    for word in words:
        flag = word.partition("=")[0]
        if flag in lists:
            if lists[flag] in seen:
                raise UsageError(f"{flag} is given twice: give all of it once")
            seen.add(lists[flag])


def flag_of(name: str) -> str:
    """`--seq-length` of `seq_length`."""
    return "--" + name.replace("_", "-")


@cache
def doc_strings(subject: type) -> Mapping[str, str]:
    """The string under each field of a dataclass, in one line."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(subject))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        match before, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _add_field(group: Any, one: "Field[Any]", kind: Any, doc: str) -> None:
    extra: dict[str, Any] = {"also": (), "off": (), "meaning": {}} | dict(one.metadata)
    flags = (flag_of(one.name), *extra["also"])
    text = _help(one, doc)
    default = argparse.SUPPRESS  # so that who merges several sources sees what was given
    plain = _without_none(kind)
    if plain is bool:
        off = extra["off"] or ((flag_of(f"no_{one.name}"),) if one.default is True else ())
        group.add_argument(*flags, dest=one.name, default=default, help=text, **SWITCH)
        for flag in off:
            group.add_argument(
                flag, dest=one.name, nargs="?", const=False, type=_untruth, default=default,
                help=f"The same as {flags[0]} false.", metavar="BOOL",
            )  # fmt: skip
    else:
        group.add_argument(*flags, dest=one.name, default=default, help=text, **_reading(plain))
    for flag, value in extra["meaning"].items():
        group.add_argument(
            flag, dest=one.name, action=_Stands, stands_for=value, default=default,
            help=f"The same as {flags[0]} {value}.",
        )  # fmt: skip


def _reading(kind: Any) -> dict[str, Any]:
    """What argparse is told of a type."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return {"choices": choices, "type": type(choices[0])}
    if get_origin(kind) is tuple:
        parts = get_args(kind)
        if parts[-1] is Ellipsis:
            return {"nargs": "*", "type": parts[0], "metavar": parts[0].__name__.upper()}
        return {"nargs": len(parts), "type": parts[0], "metavar": parts[0].__name__.upper()}
    assert kind in (int, float, str, Path), kind
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, kind.__name__.upper())}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return kind


def _help(one: "Field[Any]", doc: str) -> str:
    if one.default is MISSING and one.default_factory is MISSING:
        doc = f"{doc} Has to be given."
    elif type(one.default) in (int, float, str) and one.default != "":
        doc = f"{doc} Default: {one.default}."
    return doc.replace("; None: ", "; if not given ").replace("%", "%%")


def _truth(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text} is neither true nor false")
    return known[text.lower()]


def _untruth(text: str) -> bool:
    return not _truth(text)


SWITCH: Mapping[str, Any] = {"nargs": "?", "const": True, "type": _truth, "metavar": "BOOL"}
"""What argparse is told of a bool."""

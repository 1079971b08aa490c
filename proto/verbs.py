"""What `elasticctl` gives each of its verbs. A verb is an entry point of group `elasticctl.commands`,
a function `main(context, argv) -> exit code` that lives with what it is about; its docstring's first
line is its help.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from elastic.proto import master_pb2 as pb
from elastic.proto.security import Security

GROUP = "elasticctl.commands"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that the command line means."""

    name: str
    """Run id."""
    folder: Path | None
    """None: only its master's address is known."""
    master: str
    """host:port; empty: nobody answers there, and the folder is all there is."""
    status: pb.Status | None
    """The master's word a moment ago; None with no master."""
    security: Security


class Output(Protocol):
    """Standard output in the form asked for."""

    json: bool
    """JSON instead of tables."""
    form: str
    """What `-o` says: table or json, and for verbs that say so (`forms`) others."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Columns as wide as they need to be."""

    def row(self, cells: Sequence[str], widths: Sequence[int]) -> None:
        """A line of a table that grows: cells padded to `widths`."""

    def text(self, line: str) -> None: ...

    def document(self, value: Mapping[str, Any], *, line: bool = False) -> None:
        """JSON; with `line` on one line, as one of many."""

    def raw(self, data: bytes) -> None:
        """Bytes as they are."""

    def note(self, line: str) -> None:
        """To standard error: what is no part of the answer."""


class Find(Protocol):
    def __call__(self, *, past: bool = False) -> Job:
        """Find the job. past: what was written so far will do, where its master lives and does not answer. Raises
        ElasticError.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    out: Output
    find: Find
    """A verb reads its arguments first."""


FORMS = ("table", "json")
"""What `-o` may say to a verb that does not say it itself."""

Verb = TypeVar("Verb", bound=Callable[..., int])


def forms(*names: str) -> Callable[[Verb], Verb]:
    """Let `-o` say these to a verb."""

    def mark(verb: Verb) -> Verb:
        vars(verb)["forms"] = names
        return verb

    return mark


def forms_of(verb: Callable[..., int]) -> Sequence[str]:
    """What `-o` may say to it."""
    found: Sequence[str] = vars(verb).get("forms", FORMS)
    return found


def of_verbs(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of one of a verb's own verbs, whose parser is the `parser` among them: what is not known is
    its error, with its usage."""
    args, rest = parser.parse_known_args(argv)
    if rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def text(argument: str) -> str:
    """An argument that travels to a master: messages hold no other bytes than UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError("it is no text in UTF-8") from error
    return argument


def count(argument: str) -> int:
    """An argument from 0 up."""
    if not argument.isdecimal():
        raise argparse.ArgumentTypeError(f"{argument!r} is no number from 0 up")
    return int(argument)


def positive(argument: str) -> int:
    """An argument from 1 up, of 64 bits."""
    if not argument.isdecimal() or not 1 <= int(argument) < 2**63:
        raise argparse.ArgumentTypeError(f"{argument!r} is no number from 1 up")
    return int(argument)


def age(seconds: float) -> str:
    """As kubectl writes it: 42s, 4m12s, 3h5m, 2d4h."""
    rest = int(max(0.0, seconds))
    if rest < 60:
        return f"{rest}s"
    if rest < 3600:
        size, unit, part, small = 60, "m", 1, "s"
    elif rest < 86400:
        size, unit, part, small = 3600, "h", 60, "m"
    else:
        size, unit, part, small = 86400, "d", 3600, "h"
    left = rest % size // part
    return f"{rest // size}{unit}{left}{small}" if left else f"{rest // size}{unit}"


def said(text: str) -> str:
    """Not empty: a variable that is not set must not mean whatever the default is."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: write a name, or leave it out")
    return text

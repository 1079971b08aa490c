"""Messages between a rank and its agent: one JSON object a line, at most 1 MiB, each with "v".

| direction     | message                                      | when                                    |
|---------------|----------------------------------------------|-----------------------------------------|
| rank to agent | note: torch; environ, argv, path             | just before the first `import torch`    |
|               | note: modules; modules, environ, rehearsal   | after the first optimizer step          |
|               | step: 1                                      | after the first optimizer step          |
|               | error: {type, message, frame, traceback}     | an exception that ends the script       |
|               | unit: n                                      | the script needs a multiple of n ranks  |
|               | keeper: 1, and a socket                      | a checkpointer asks for `keeper.py`     |
|               | stacks: n, and a file                        | descriptor n is written to on a signal  |
|               | recorder: 1, and a socket                    | what the rank does may be asked there   |
| agent to rank | unit: "ok" or the reason why not             | the answer                              |

The version is in every line, since more than one process may write to a link (a launcher script and
what it starts). A message or a field that is not known is ignored; bytes that are no message raise
`LinkError` and nothing else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic.proto import version
from elastic.proto.errors import LinkError, ProtocolMismatch

LINE_LIMIT = 1 << 20
"""Bytes a line may have, its newline included."""

TRACEBACK_LIMIT = 16 << 10
"""Characters of a traceback that travel: its beginning and, mostly, its end."""

MESSAGE_LIMIT = 4 << 10
"""Characters of an error's message that travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchNote:
    """The script is about to import torch for the first time."""

    environ: dict[str, str]
    argv: tuple[str, ...]
    path: tuple[str, ...]
    """`sys.path` at that moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulesNote:
    """What the script had imported from site-packages by its first optimizer step, but torch."""

    modules: tuple[str, ...]
    environ: dict[str, str]
    """As the script has made it by then."""
    rehearsal: tuple[str, ...] = ()
    """`module:function` and its argument, that `session.set_rehearsal` was given; or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The first optimizer step of this process has finished."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorNote:
    """An exception is ending the script."""

    type: str
    message: str
    frame: str
    """`file:line in function`: the innermost frame of the user's own code, else the innermost."""
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAsked:
    """The script can only train with a multiple of `ranks` ranks."""

    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitAnswered:
    """The agent's answer: `reason` is empty where the world is fine."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperAsked:
    """A checkpointer wants a keeper at the other end of the socket that comes with this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksOffered:
    """The file that comes with this is where the rank writes its stacks when `looks.DUMP_SIGNAL` asks for them."""

    fd: int
    """The rank's own descriptor of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderOffered:
    """On the socket that comes with this, any byte is answered with `looks.Told`, JSON."""


Message = (
    TorchNote
    | ModulesNote
    | FirstStep
    | ErrorNote
    | UnitAsked
    | UnitAnswered
    | KeeperAsked
    | RecorderOffered
    | StacksOffered
)


def encode(message: Message) -> bytes:
    """One line; raises `LinkError` where it would be longer than `LINE_LIMIT`."""
    fields: dict[str, Any] = {"v": f"{version.LINK}"}
    match message:
        case TorchNote():
            fields |= {"note": "torch", "environ": message.environ}
            fields |= {"argv": message.argv, "path": message.path}
        case ModulesNote():
            fields |= {"note": "modules", "modules": message.modules}
            fields |= {"environ": message.environ, "rehearsal": message.rehearsal}
        case FirstStep():
            fields["step"] = message.step
        case ErrorNote():
            fields["error"] = {
                "type": message.type,
                "message": _shorten(message.message, MESSAGE_LIMIT),
                "frame": message.frame,
                "traceback": _shorten(message.traceback, TRACEBACK_LIMIT),
            }
        case UnitAsked():
            fields["unit"] = message.ranks
        case UnitAnswered():
            fields["unit"] = message.reason or "ok"
        case KeeperAsked():
            fields["keeper"] = 1
        case RecorderOffered():
            fields["recorder"] = 1
        case StacksOffered():
            fields["stacks"] = message.fd
    line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
    if len(line) > LINE_LIMIT:
        raise LinkError(f"a message of {len(line)} bytes is too long for the link")
    return line


class Parser:
    """Bytes in, messages out; keeps the beginning of a line until its end has come.

    It never holds more than `LINE_LIMIT` bytes. After a `LinkError` it goes on with the next line.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[Message | LinkError]:
        """The messages that `data` completes, in order; what is wrong is in its place an error."""
        found: list[Message | LinkError] = []
        *lines, rest = data.split(b"\n")
        for line in lines:
            message = self._finish(line)
            if message is not None:
                found.append(message)
        self._keep(rest, found)
        return found

    def _finish(self, line: bytes) -> Message | LinkError | None:
        whole = bytes(self._rest) + line
        self._rest.clear()
        if self._skipping:
            self._skipping = False
            return None
        try:
            return parse(whole)
        except LinkError as error:
            return error

    def _keep(self, rest: bytes, found: list[Message | LinkError]) -> None:
        if self._skipping:
            return
        if len(self._rest) + len(rest) >= LINE_LIMIT:
            self._rest.clear()
            self._skipping = True
            found.append(LinkError(f"a line on the link is longer than {LINE_LIMIT} bytes"))
            return
        self._rest += rest


def parse(line: bytes) -> Message | None:
    """One line, without its newline; None for a message that this version does not know.

    Raises `LinkError`, or `ProtocolMismatch` inside it, as its cause.
    """
    if len(line) >= LINE_LIMIT:
        raise LinkError(f"a line on the link is longer than {LINE_LIMIT} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LinkError("a line on the link is no JSON") from error
    if not isinstance(fields, dict):
        raise LinkError("a line on the link is no JSON object")
    _check_version(fields.get("v"))
    for key, build in _BUILDERS:
        if key in fields:
            try:
                return build(fields)
            except (KeyError, TypeError, ValueError) as error:
                raise LinkError(f"a message {key!r} on the link is malformed: {error!r}") from error
    return None


def _check_version(text: object) -> None:
    theirs = version.parse(text)
    if theirs is None:
        raise LinkError("a message on the link carries no version")
    try:
        version.check("the rank's link", theirs, version.LINK)
    except ProtocolMismatch as error:
        raise LinkError(str(error)) from error


def _note(fields: dict[str, Any]) -> Message | None:
    match fields["note"]:
        case "torch":
            return TorchNote(
                environ=_environ(fields["environ"]),
                argv=_texts(fields["argv"]),
                path=_texts(fields["path"]),
            )
        case "modules":
            return ModulesNote(
                modules=_texts(fields["modules"]),
                environ=_environ(fields["environ"]),
                rehearsal=_texts(fields.get("rehearsal", [])),
            )
    return None


def _environ(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError("environ is no object")
    return {_text(k): _text(v) for k, v in value.items()}


def _step(fields: dict[str, Any]) -> Message:
    return FirstStep(step=_count(fields["step"]))


def _error(fields: dict[str, Any]) -> Message:
    error = fields["error"]
    if not isinstance(error, dict):
        raise TypeError("error is no object")
    return ErrorNote(
        type=_text(error["type"]),
        message=_shorten(_text(error["message"]), MESSAGE_LIMIT),
        frame=_text(error["frame"]),
        traceback=_shorten(_text(error["traceback"]), TRACEBACK_LIMIT),
    )


def _unit(fields: dict[str, Any]) -> Message:
    unit = fields["unit"]
    if isinstance(unit, str):
        return UnitAnswered(reason="" if unit == "ok" else unit)
    return UnitAsked(ranks=_count(unit))


_BUILDERS: tuple[tuple[str, Callable[[dict[str, Any]], Message | None]], ...] = (
    ("note", _note),
    ("step", _step),
    ("error", _error),
    ("unit", _unit),
    ("keeper", lambda fields: KeeperAsked()),
    ("recorder", lambda fields: RecorderOffered()),
    ("stacks", lambda fields: StacksOffered(fd=_count(fields["stacks"]))),
)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is expected")
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("a list of texts is expected")
    return tuple(_text(item) for item in value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError("a number of 1 or more is expected")
    return value


def _shorten(text: str, limit: int) -> str:
    """At most `limit` characters: the beginning and, mostly, the end, where the cause stands."""
    if len(text) <= limit:
        return text
    head = limit // 4
    cut = "\n[...]\n"
    return text[:head] + cut + text[len(text) - (limit - head - len(cut)) :]

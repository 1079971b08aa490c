"""Frozen dataclasses to typed JSON and back, by their annotations; nothing is ever executed."""

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import (
    Annotated,
    Any,
    NewType,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from elastic.proto.errors import CodecError

T = TypeVar("T")

SHARED = "shared"
"""In `Annotated`, with a tuple of dataclasses of plain values: where thousands of texts have the same of it, it is
decoded once, and one object."""
MOST_SHARED = 1024
"""The newest of those that are kept."""


def dumps(value: object) -> str:
    """JSON of a dataclass; a field that holds its default is left out."""
    return json.dumps(_encode(value), separators=(",", ":"))


def loads(hint: Any, text: str | bytes) -> Any:
    """The value of type `hint` that `dumps` wrote. Raises CodecError, in one short line, if it is none."""
    try:
        return _decode(hint, json.loads(text))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        what = getattr(hint, "__name__", "event")
        why = " ".join(str(error).split())[:200]
        raise CodecError(f"no {what} of this release: {why}") from error


def _encode(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        body: dict[str, object] = {"": type(value).__name__}
        for name, default in _defaults(type(value)):
            item = getattr(value, name)
            if item is not default and item != default:
                body[name] = _encode(item)
        return body
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return [[_encode(key), _encode(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[str]", value))
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, object], ...]:
    return tuple(
        (f.name, f.default_factory() if f.default_factory is not MISSING else f.default)
        for f in fields(kind)
    )


def _decode(hint: Any, value: Any) -> Any:
    if isinstance(hint, NewType):
        hint = hint.__supertype__
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(hint, value)
    if origin is not None and not isinstance(value, list):
        raise TypeError(f"{str(value)[:80]} is no list")
    if origin is Annotated:
        return _decode_shared(get_args(hint)[0], value)
    if origin is tuple:
        args = get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], item) for item in value)
        return tuple(_decode(arg, item) for arg, item in zip(args, value, strict=True))
    if origin is frozenset:
        return frozenset(_decode(get_args(hint)[0], item) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        key, item = get_args(hint)
        return {_decode(key, k): _decode(item, v) for k, v in value}
    if is_dataclass(hint):
        return _decode_dataclass(cast("type", hint), value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise TypeError(f"{str(value)[:80]!r} is no {hint.__name__}")
    return value


def _decode_shared(hint: Any, value: Any) -> Any:
    try:
        return _shared(hint, tuple([tuple(item.items()) for item in value]))
    except (AttributeError, TypeError):  # no dataclasses, or of a later release with more
        return _decode(hint, value)


@lru_cache(MOST_SHARED)
def _shared(hint: Any, items: tuple[tuple[tuple[str, Any], ...], ...]) -> Any:
    return _decode(hint, [dict(item) for item in items])


def _decode_union(hint: Any, value: Any) -> Any:
    members = get_args(hint)
    if value is None and type(None) in members:
        return None
    kinds = [m for m in members if m is not type(None)]
    if isinstance(value, dict):
        kinds = [m for m in kinds if getattr(m, "__name__", None) == value.get("")]
    if len(kinds) != 1:
        raise TypeError(f"{str(value)[:80]} is none of what is known here")
    return _decode(kinds[0], value)


def _decode_dataclass(kind: type, value: Any) -> Any:
    if not isinstance(value, dict) or value.get("") != kind.__name__:
        raise TypeError(f"{str(value)[:80]} is no {kind.__name__}")
    hints = _hints(kind)
    return kind(**{k: _decode(hints[k], v) for k, v in value.items() if k and k in hints})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)

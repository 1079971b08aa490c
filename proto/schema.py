"""Frozen dataclasses as a structural schema of Kubernetes, and JSON read by them: one description of an object's fields.

A field's name is written in camelCase in JSON. Its type says what it may hold: int, bool, float, str, `Literal`,
`T | None`, a tuple, a `Mapping` of texts, another such class, `IntOrString`, `Scalar`, or `Json`, an object that is
passed on as it is, without its nulls. What a type cannot say is in its `Annotated`: `Range`, `Pattern`, `Most`,
`Known`. The string below a field is its description.
"""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elastic.proto.errors import UsageError

Json = Mapping[str, Any]
"""An object of the API's own, whose fields are not checked here."""
IntOrString = int | str
Scalar = int | float | str
"""What a server takes as it is: its schema cannot say number or text, `cpu: 0.5` or `cpu: 500m`."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range:
    """Of a number, both ends included."""

    least: int
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """Of a text, whole, as RE2 and Python both read it."""

    text: str
    words: str
    """What to write instead: "write a quantity such as 64Gi"."""


@dataclass(frozen=True, slots=True)
class Most:
    """Items of a list, or characters of a text."""

    count: int
    least: int = 0


@dataclass(frozen=True, slots=True)
class Known:
    """Of a `Json`: what is known of its fields is as in this class; the others are passed on."""

    kind: type


class FieldError(UsageError):
    """A field holds what it may not."""


@cache
def camel(name: str) -> str:
    """node_unit -> nodeUnit."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# --- reading -------------------------------------------------------------------------------------


def load(kind: type[T], raw: Any, path: str) -> T:
    """`raw` as `kind`, defaults filled in. Fields that are not known are left out, as the API server does; null is
    nothing said, anywhere. Raises FieldError, which names the field."""
    if not isinstance(raw, Mapping):
        raise FieldError(f"{path}: write an object, not {_shown(raw)}")
    hints = _hints(kind)  # type: ignore[arg-type]  # a class is hashable
    found = {}
    for one in _fields(kind):
        value = raw.get(camel(one.name))
        where = f"{path}.{camel(one.name)}"
        if value is not None:
            found[one.name] = _value(hints[one.name], value, where)
        elif one.default is MISSING and one.default_factory is MISSING:
            raise FieldError(f"{where} is missing")
    return kind(**found)


def dump(value: Any) -> Any:
    """The JSON that `load` reads as `value`; what is None is left out."""
    if is_dataclass(value) and not isinstance(value, type):
        items = ((camel(one.name), getattr(value, one.name)) for one in fields(value))
        return {name: dump(item) for name, item in items if item is not None}
    if isinstance(value, tuple):
        return [dump(item) for item in value]
    return value


def _value(hint: Any, value: Any, path: str) -> Any:
    hint, notes = _bare(hint)
    found = _typed(hint, value, path)
    for note in notes:
        _hold(note, found, path)
    return found


def _typed(hint: Any, value: Any, path: str) -> Any:
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise FieldError(
                f"{path}: write one of {', '.join(get_args(hint))}, not {_shown(value)}"
            )
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise FieldError(f"{path}: write a list, not {_shown(value)}")
        item = get_args(hint)[0]
        return tuple(_value(item, one, f"{path}[{n}]") for n, one in enumerate(value))
    if _is_map(hint):
        if not isinstance(value, Mapping):
            raise FieldError(f"{path}: write an object, not {_shown(value)}")
        item = get_args(hint)[1]
        return {
            key: _value(item, one, f"{path}.{key}") for key, one in value.items() if one is not None
        }
    if is_dataclass(hint) and isinstance(hint, type):
        return load(hint, value, path)
    if hint in (IntOrString, Scalar):
        wanted: tuple[type, ...] = get_args(hint)
    else:
        wanted = (Mapping,) if hint == Json else (int, float) if hint is float else (hint,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise FieldError(f"{path}: write {_named(hint)}, not {_shown(value)}")
    return _said(value) if hint == Json else value


def _said(value: Any) -> Any:
    """Without the fields that are null."""
    if isinstance(value, Mapping):
        return {key: _said(one) for key, one in value.items() if one is not None}
    return [_said(one) for one in value] if isinstance(value, list | tuple) else value


def _hold(note: Range | Pattern | Most | Known, value: Any, path: str) -> None:
    if isinstance(note, Known):
        load(note.kind, value, path)
    elif isinstance(note, Range):
        if value < note.least or (note.most is not None and value > note.most):
            upper = "or more" if note.most is None else f"to {note.most}"
            raise FieldError(f"{path}: write {note.least} {upper}, not {value}")
    elif isinstance(note, Pattern):
        if not re.fullmatch(note.text, str(value)):
            raise FieldError(f"{path}: {note.words}, not {_shown(value)}")
    elif len(value) > note.count:
        raise FieldError(f"{path}: at most {note.count}, not {len(value)}")
    elif len(value) < note.least:
        raise FieldError(f"{path}: at least {note.least}, not {len(value)}")


def _is_map(hint: Any) -> bool:
    return hint != Json and get_origin(hint) is Mapping


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."


def _named(hint: Any) -> str:
    if hint == Json:
        return "an object"
    if hint in (IntOrString, Scalar):
        return "a number or a text"
    return {int: "a number", float: "a number", str: "a text", bool: "true or false"}[hint]


# --- the schema ----------------------------------------------------------------------------------


def openapi(kind: type) -> dict[str, Any]:
    """The structural schema of an object of that class, with defaults."""
    hints, docs = _hints(kind), descriptions(kind)
    properties, required = {}, []
    for one in _fields(kind):
        schema = _schema(hints[one.name])
        if words := docs.get(one.name):
            schema = {"description": words, **schema}
        if one.default is MISSING and one.default_factory is MISSING:
            required.append(camel(one.name))
        elif (default := _beyond(dump(_default(one)), schema)) not in (None, [], ""):
            schema["default"] = default
        properties[camel(one.name)] = schema
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return found | ({"required": required} if required else {})


def _beyond(value: Any, schema: Mapping[str, Any]) -> Any:
    """A default without what the defaults of its own fields are: the server fills these in, too."""
    inner = schema.get("properties")
    if not isinstance(value, dict) or inner is None:
        return value
    rest = {name: _beyond(one, inner[name]) for name, one in value.items()}
    return {
        name: one
        for name, one in rest.items()
        if one not in ([], "") and one != inner[name].get("default")
    }


@cache
def descriptions(kind: type) -> Mapping[str, str]:
    """What the string below each field says, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = " ".join(text.split())
    return found


def _schema(hint: Any) -> dict[str, Any]:
    hint, notes = _bare(hint)
    found = _of_type(hint)
    for note in notes:
        if isinstance(note, Range):
            found["minimum"] = note.least
            if note.most is not None:
                found["maximum"] = note.most
        elif isinstance(note, Known):
            found |= _open(openapi(note.kind))
        elif isinstance(note, Most):
            found["maxItems" if found["type"] == "array" else "maxLength"] = note.count
            if note.least:
                found["minItems" if found["type"] == "array" else "minLength"] = note.least
        else:
            found["pattern"] = f"^({note.text})$"
    return found


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """Which takes fields that it does not know, too."""
    if "items" in schema:
        return {**schema, "items": _open(schema["items"])}
    if "properties" not in schema:
        return schema
    inner = {name: _open(one) for name, one in schema["properties"].items()}
    return {**schema, "x-kubernetes-preserve-unknown-fields": True, "properties": inner}


def _of_type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _schema(get_args(hint)[0])}
    if hint == IntOrString:
        return {"x-kubernetes-int-or-string": True}
    if hint == Scalar:
        return {"x-kubernetes-preserve-unknown-fields": True}
    if _is_map(hint):
        return {"type": "object", "additionalProperties": _schema(get_args(hint)[1])}
    if hint == Json:
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if is_dataclass(hint) and isinstance(hint, type):
        return openapi(hint)
    names = {int: "integer", float: "number", bool: "boolean", str: "string"}
    return {"type": names[hint]}


@cache
def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Without `None` and `Annotated`, and what that said."""
    if get_origin(hint) is Annotated:
        inner, notes = _bare(get_args(hint)[0])
        return inner, (*notes, *get_args(hint)[1:])
    if hint not in (IntOrString, Scalar) and get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arg for arg in get_args(hint) if arg is not types.NoneType)
        return _bare(inner)
    return hint, ()


@cache  # for each object anew it was two fifths of an operator's work
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fields(kind: type) -> tuple[Field[Any], ...]:
    return fields(kind)


def _default(one: Field[Any]) -> Any:
    factory: Any = one.default_factory
    return factory() if one.default is MISSING else one.default

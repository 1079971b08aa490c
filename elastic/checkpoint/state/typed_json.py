"""What is no tensor, as JSON that keeps every type: a checkpoint's counters, schedules and seeds.

Numbers, texts, True, False, None, lists, and objects with string keys are plain JSON. All else is an
object with one key that begins with `$` and names the type; a user's own such key is wrapped as well.
Decoding builds the types of this page and no other, so hostile bytes run nothing. A tensor is a
reference to bytes elsewhere: `{"$tensor": name}`.
"""

import base64
import collections
import json
import math
import re
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastic.proto.errors import CheckpointError

DEPTH = 100
"""Levels of nesting that a value may have."""
_DIMS = 64
"""Of an array; numpy's limit."""
_ARRAY = re.compile(r"[<>|][biufcmMSUV][1-9]\d{0,8}(\[\w{1,20}\])?", re.ASCII)
"""Arrays that can be kept, by numpy's code: of numbers, times, texts and bytes, all of one size."""

Store = Callable[[torch.Tensor, str], str]
"""What keeps a tensor that was met at a path, and returns the name to find it by."""
Find = Callable[[str], Any]
"""What returns the tensor of a name."""


def encode(value: object, path: str = "", store: Store | None = None) -> str:
    """`value` as JSON. Raises `CheckpointError`, which names the place, for what cannot be encoded."""
    data = _Encoder(store).encode(value, path, 0)
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def decode(text: str | bytes, find: Find | None = None) -> Any:
    """What `encode` was given. Raises `CheckpointError` where the text is not of its making."""
    try:
        return _Decoder(find, 0).decode(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError("a checkpoint's values are no JSON") from error


@dataclass(frozen=True, slots=True)
class _Encoder:
    store: Store | None

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if depth > DEPTH:
            raise CheckpointError(f"{path or 'the state'} is nested more than {DEPTH} levels deep")
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return (
                value
                if _plain(value)
                else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}
            )
        if kind is int:
            return value if -(2**53) <= value <= 2**53 else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": _bits(value)}
        if kind is list:
            return self.items(value, path, depth)
        if kind is dict:
            return self.mapping(value, path, depth)
        return self._tagged(value, path, depth)

    def items(self, value: Any, path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]

    def pairs(self, value: Any, path: str, depth: int) -> list[Any]:
        keys = _Encoder(None)  # a tensor is its own in every run
        return [
            [
                keys.encode(key, f"{path}.keys()", depth + 1),
                self.encode(item, f"{path}[{key!r}]", depth + 1),
            ]
            for key, item in value.items()
        ]

    def mapping(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if _ordinary(value):
            return {
                key: self.encode(item, f"{path}.{key}" if path else key, depth + 1)
                for key, item in value.items()
            }
        return {"$dict": self.pairs(value, path, depth)}

    def _tagged(self, value: Any, path: str, depth: int) -> Any:
        if self.store is not None and isinstance(value, torch.Tensor):
            return {"$tensor": self.store(value, path)}
        if isinstance(value, np.generic | np.ndarray):
            return {"$numpy": _numpy(value, path)}
        for kind in _KINDS:
            if type(value) is kind.type:
                return {kind.tag: kind.encode(self, value, path, depth)}
        raise CheckpointError(
            f"{path or 'the state'} is a {type(value).__module__}.{type(value).__qualname__}, which a "
            "checkpoint cannot keep: put its numbers, texts, lists, dicts or tensors into the state"
        )


_BROKEN = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, struct.error)
"""What building a value raises where its parts make no sense."""


@dataclass(frozen=True, slots=True)
class _Decoder:
    find: Find | None
    depth: int

    def decode(self, data: Any) -> Any:
        if not isinstance(data, dict | list):
            return data
        if self.depth > DEPTH:
            raise CheckpointError(f"a checkpoint's values are more than {DEPTH} levels deep")
        return _Decoder(self.find, self.depth + 1).within(data)

    def within(self, data: Any) -> Any:
        if isinstance(data, list):
            return self.items(data)
        tags = [key for key in data if key.startswith("$")]
        if not tags:
            return {key: self.decode(item) for key, item in data.items()}
        if len(data) > 1 or not (tags[0] in _DECODERS or (tags[0] == "$tensor" and self.find)):
            raise CheckpointError(
                f"a checkpoint's values hold {tags[0][:40]!r}, which is unknown here"
            )
        if self.find is not None and tags[0] == "$tensor":
            return self.find(str(data["$tensor"]))
        try:
            return _DECODERS[tags[0]](self, data[tags[0]])
        except _BROKEN as error:
            raise CheckpointError(f"a checkpoint's values hold a broken {tags[0]!r}") from error

    def items(self, data: Any) -> list[Any]:
        return [self.decode(item) for item in data]

    def pairs(self, data: Any) -> dict[Any, Any]:
        keys = _Decoder(None, self.depth)
        return {keys.decode(key): self.decode(item) for key, item in data}


@dataclass(frozen=True, slots=True)
class _Kind:
    type: type
    tag: str
    encode: Callable[[_Encoder, Any, str, int], Any]
    decode: Callable[[_Decoder, Any], Any]


def _listed(kind: type) -> _Kind:
    """A container of values that is made from a list of them."""
    return _Kind(kind, f"${kind.__name__}", _Encoder.items, lambda d, data: kind(d.items(data)))


def _unordered(kind: type) -> _Kind:
    """A set; in an order that does not depend on hashes."""

    def items(encoder: _Encoder, value: Any, path: str, depth: int) -> list[Any]:
        return sorted(_Encoder(None).items(value, path, depth), key=json.dumps)

    def build(decoder: _Decoder, data: Any) -> Any:
        return kind(_Decoder(None, decoder.depth).items(data))

    return _Kind(kind, f"${kind.__name__}", items, build)


def _paired(kind: type) -> _Kind:
    return _Kind(kind, f"${kind.__name__}", _Encoder.pairs, lambda d, data: kind(d.pairs(data)))


def _simple(
    kind: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any], tag: str = ""
) -> _Kind:
    """A type of one fixed form."""
    return _Kind(
        kind,
        f"${tag or kind.__name__}",
        lambda _, value, path, depth: encode(value),
        lambda _, data: decode(data),
    )


def _deque(encoder: _Encoder, value: Any, path: str, depth: int) -> list[Any]:
    return [value.maxlen, encoder.items(value, path, depth)]


def _defaultdict(encoder: _Encoder, value: Any, path: str, depth: int) -> list[Any]:
    for name, known in _FACTORIES.items():
        if value.default_factory is known:
            return [name, encoder.pairs(value, path, depth)]
    raise CheckpointError(
        f"{path or 'the state'} is a defaultdict of {value.default_factory!r}, which a checkpoint "
        "cannot keep: make it a dict"
    )


def _ordinary(keys: Collection[Any]) -> bool:
    """All of them are those of a JSON object; for many at once, since models have thousands."""
    if not {str}.issuperset(map(type, keys)):
        return False
    text = "\0" + "\0".join(keys)
    if text.isascii() and "\0$" not in text:
        return True
    return all(not key.startswith("$") and _plain(key) for key in keys)


def _plain(text: str) -> bool:
    """JSON joins two surrogates that were apart."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _from_bits(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _numpy(value: Any, path: str) -> list[Any]:
    array = np.asarray(value)
    known = _ARRAY.fullmatch(array.dtype.str) and np.dtype(array.dtype.str) == array.dtype
    if not known or type(value) not in (np.ndarray, array.dtype.type):
        raise CheckpointError(
            f"{path or 'the state'} is a numpy array of {array.dtype}, which a checkpoint cannot keep: "
            "make it one of numbers"
        )
    shape = None if isinstance(value, np.generic) else list(array.shape)
    return [array.dtype.str, shape, _base64(array.tobytes())]


def _from_numpy(data: Any) -> Any:
    code, shape, text = data
    if not _ARRAY.fullmatch(code):
        raise ValueError("an array of what is never written")
    dtype, raw = np.dtype(code), _from_base64(text)
    sizes = _sizes(shape or [])
    if dtype.itemsize * math.prod(sizes) != len(raw):
        raise ValueError("an array of another size")
    array: Any = np.ndarray(sizes, dtype, raw).copy()
    return array[()] if shape is None else array


def _sizes(data: Any) -> tuple[int, ...]:
    if len(data) > _DIMS or not all(type(size) is int and abs(size) < 2**63 for size in data):
        raise ValueError("no shape")
    return tuple(data)


_FACTORIES: dict[str, Any] = {
    "None": None, "int": int, "float": float, "list": list, "dict": dict, "set": set,
}  # fmt: skip
_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}
_KINDS = (
    _listed(tuple),
    _unordered(set),
    _unordered(frozenset),
    _paired(collections.OrderedDict),
    _paired(collections.Counter),
    _Kind(
        collections.deque,
        "$deque",
        _deque,
        lambda d, data: collections.deque(d.items(data[1]), data[0]),
    ),
    _Kind(
        collections.defaultdict,
        "$defaultdict",
        _defaultdict,
        lambda d, data: collections.defaultdict(_FACTORIES[data[0]], d.pairs(data[1])),
    ),
    _simple(torch.Size, list, lambda data: torch.Size(_sizes(data))),
    _simple(
        complex,
        lambda value: [_bits(value.real), _bits(value.imag)],
        lambda data: complex(_from_bits(data[0]), _from_bits(data[1])),
    ),
    _simple(bytes, _base64, _from_base64),
    _simple(bytearray, _base64, lambda text: bytearray(_from_base64(text))),
    _simple(range, lambda value: [value.start, value.stop, value.step], lambda data: range(*data)),
    _simple(torch.dtype, lambda value: str(value).removeprefix("torch."), _DTYPES.__getitem__),
    _simple(torch.device, str, torch.device),
)
_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$int": lambda _, text: int(text, 16),
    "$str": lambda _, text: _from_base64(text).decode("utf-8", "surrogatepass"),
    "$float": lambda _, text: _from_bits(text),
    "$dict": _Decoder.pairs,
    "$numpy": lambda _, data: _from_numpy(data),
} | {kind.tag: kind.decode for kind in _KINDS}

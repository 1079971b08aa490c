"""A state's tree of values as DCP sees it: flat, by names with dots; and back. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic.checkpoint.state import typed_json
from elastic.proto.errors import CheckpointError

Route = tuple[str | int, ...]
"""The keys, and places in lists, that lead to a value; joined by dots they are its name."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The place of a tensor in a tree that was read."""

    name: str


def leaves(tree: Any, route: Route = ()) -> Iterator[tuple[Route, Any]]:
    """What DCP keeps one by one: a dict is taken apart, a list only where it holds dicts or tensors."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, (*route, str(key)))
    elif isinstance(tree, list) and any(map(_branches, tree)):
        for place, item in enumerate(tree):
            yield from leaves(item, (*route, place))
    else:
        yield route, tree


def _branches(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_branches, value))
    return isinstance(value, dict | Reference)


def encode(
    values: Mapping[str, Any], tensors: Iterable[str], routes: Mapping[str, Route]
) -> tuple[bytes, dict[str, torch.Tensor]]:
    """The tree of `values` and of the names of `tensors` as typed JSON, and the tensors in values.

    Raises `CheckpointError` for what a checkpoint cannot keep.
    """
    marks = {name: torch.empty(0) for name in tensors}
    names = {id(mark): name for name, mark in marks.items()}
    inner: dict[str, torch.Tensor] = {}

    def store(tensor: torch.Tensor, path: str) -> str:
        if id(tensor) in names:
            return names[id(tensor)]
        inner[path] = tensor
        return path

    return typed_json.encode(_nested({**marks, **values}, routes), "", store).encode(), inner


class _Node(dict[str | int, Any]):
    """A dict that routes go through; those of the values are no such ones."""


def _nested(leaves: Mapping[str, Any], routes: Mapping[str, Route]) -> Any:
    root = _Node()
    for name, leaf in leaves.items():
        *way, last = routes.get(name, (name,))
        node: Any = root
        for key in way:
            node = node.setdefault(key, _Node()) if isinstance(node, _Node) else None
        if not isinstance(node, _Node) or last in node:
            raise CheckpointError(f"{name!r} lies within another value of the state")
        node[last] = leaf
    return _plain(root)


def _plain(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if node and all(type(key) is int for key in node):
        return [_plain(node[place]) for place in sorted(node)]
    return {key: _plain(item) for key, item in node.items()}

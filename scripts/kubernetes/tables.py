"""What `kubectl get` would print: the server's own table of a kind, by its printer columns."""

from typing import Any

from scripts.kubernetes.client import Client

Object = dict[str, Any]
_AS_TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


def get(client: Client, path: str, *, wide: bool = False) -> list[list[str]]:
    """A heading and a row an object."""
    found = client.call("GET", path, accept=_AS_TABLE)
    columns = [
        (number, each["name"].upper())
        for number, each in enumerate(found["columnDefinitions"])
        if wide or not each["priority"]
    ]
    rows = [[_cell(row["cells"][number]) for number, _ in columns] for row in found["rows"]]
    return [[name for _, name in columns], *rows]


def text(rows: list[list[str]]) -> str:
    """In columns, as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in rows]  # fmt: skip
    return "\n".join(lines)


def _cell(value: object) -> str:
    return "" if value is None else str(value)

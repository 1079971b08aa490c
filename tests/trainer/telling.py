"""Where `elasticctl`'s verbs write in tests that call them, whether or not this checkout is installed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.proto.verbs import Context, Job


class Told:
    """What was told, as a person or a program gets it."""

    def __init__(self, *, json: bool = False) -> None:
        self.json = json
        self.form = "json" if json else "table"
        self.out = ""
        self.notes: list[str] = []
        self.context = Context(out=self, find=_no_job)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        for row in (columns, *rows):
            self.row(row, ())

    def row(self, cells: Sequence[str], widths: Sequence[int]) -> None:
        self.text(" ".join(cells))

    def text(self, line: str) -> None:
        self.out += f"{line}\n"

    def document(self, value: Mapping[str, Any], *, line: bool = False) -> None:
        self.text(json.dumps(value))

    def raw(self, data: bytes) -> None:
        self.out += data.decode()

    def note(self, line: str) -> None:
        self.notes.append(line)

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def _no_job(*, past: bool = False) -> Job:
    raise AssertionError("no job is asked")

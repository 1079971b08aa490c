"""`elasticctl`, run and read."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


Ask = Callable[..., Answer]


def columns(line: str) -> list[str]:
    return line.split()


def elasticctl(*args: str) -> list[str]:
    return [sys.executable, "-m", "elastic.ctl", *args]

"""What a probe's program says of itself: one line of JSON, `{"probe", "ok", "what", "figures"}`, and `"parts"`
where it tells what took how long."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.proto.errors import CodecError

LONGEST = 1 << 16
"""Bytes of a line."""
CONTEXT = "context"
"""Said to `device.py`: from now on it may be on its device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """ok with no figures: nothing could be found out, and `what` says why."""

    probe: str
    ok: bool
    what: str = ""
    """What is wrong, in words; empty where nothing is."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Units are in the names: `tflops`, `gb_s` (1e9 bytes a second), `bytes`, `s`."""
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """When each of its parts began and was over, by name: CLOCK_MONOTONIC, in seconds, the same in all processes."""


def encode(answer: Answer) -> str:
    """One line, without its end. Figures that are not finite are left out: they say nothing."""
    figures = {name: value for name, value in answer.figures.items() if math.isfinite(value)}
    said = {"probe": answer.probe, "ok": answer.ok, "what": answer.what, "figures": figures}
    return json.dumps({**said, "parts": answer.parts} if answer.parts else said)


def decode(line: bytes) -> Answer:
    """Raises CodecError, in words that say what came instead."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"it printed {_shown(line)}, which is no JSON") from error
    if not (
        isinstance(said, dict)
        and said.keys() | {"parts"} == {"probe", "ok", "what", "figures", "parts"}
        and isinstance(said["probe"], str)
        and isinstance(said["ok"], bool)
        and isinstance(said["what"], str)
        and isinstance(said["figures"], dict)
        and all(_is_number(value) for value in said["figures"].values())
        and isinstance(parts := said.get("parts", {}), dict)
        and all(_is_span(value) for value in parts.values())
    ):
        raise CodecError(f"it printed {_shown(line)}, which is no answer")
    return Answer(**{**said, "parts": {name: (began, end) for name, (began, end) in parts.items()}})


def _is_span(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(line: bytes) -> str:
    return repr(line[:100].decode(errors="replace"))

"""A checkpoint on storage: which folder, which files, and the manifest that makes them one.

    <checkpoint>/step-00001000/shard-00000-of-00008.r3-1f0c2a9b.safetensors    one a rank
    <checkpoint>/step-00001000/manifest.json                                   written last
    <checkpoint>/step-00001000/pinned                                          never to be deleted

A shard's name ends in its round and the beginning of the job's own id. A step without its manifest is
none. The manifest is JSON: {"version", "job", "sequence", "round", "step", "world_size", "value",
"shards": [{"rank", "file", "bytes", "digest"}]}; `value` is what the script gave at the save, a number
or null; `digest` is the xxh3, in hex, of the table of checksums at the file's end (`sums.py`), so no
other file can take its place.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic.proto import version
from elastic.proto.errors import CheckpointError, ProtocolMismatch
from elastic.proto.moment import Moment

NAME = "manifest.json"
PIN = "pinned"
_STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
MOST_STEP = 10**18 - 1
"""Whose folder is still known for one."""
_DIGEST = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"[^/\0\ud800-\udfff]+")
_SHARD = re.compile(r"\.?shard-\d{5,}-of-\d{5,}\.r(\d{1,18})-([^/]*)\.safetensors.*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's file."""

    rank: int
    file: str
    bytes: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    job: str
    """Its own id: another job of the same name, in the same folder, has another."""
    sequence: int
    """Grows with each commit to this checkpoint, of whatever job: the newest is the one to load."""
    round: int
    step: int
    world_size: int
    value: float | None = None
    """By which the best are kept."""
    shards: tuple[Shard, ...]

    @property
    def moment(self) -> Moment:
        return Moment(self.round, self.step)

    @property
    def order(self) -> tuple[int, int, int]:
        """The largest is the newest; of two that were committed at once, the later moment."""
        return self.sequence, self.round, self.step


def folder(step: int) -> str:
    """Of a step's files, in the checkpoint's."""
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    """The step whose folder has that name; None where it is something else's."""
    found = _STEP.fullmatch(name)
    return (int(found[1]) or None) if found else None  # step 0 is nothing


def file(rank: int, world_size: int, round_: int, job: str) -> str:
    """A shard's; of another round or job it is another file, so a late writer spoils nothing."""
    return f"shard-{rank:05}-of-{world_size:05}.r{round_}-{job[:8]}.safetensors"


def written_in(name: str) -> tuple[int, str] | None:
    """The round in which a shard of that name, or its draft, was written, and the beginning of the
    job's own id; None where it is no shard."""
    found = _SHARD.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def draft(name: str, writer: str) -> str:
    """What a file is called until all of it is there."""
    return f".{name}.{writer}"


def dumps(manifest: Manifest) -> str:
    shards = [
        {"rank": s.rank, "file": s.file, "bytes": s.bytes, "digest": f"{s.digest:016x}"}
        for s in manifest.shards
    ]
    fields = {
        "version": str(version.CHECKPOINT),
        "job": manifest.job,
        "sequence": manifest.sequence,
        "round": manifest.round,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "value": manifest.value,
        "shards": shards,
    }
    return json.dumps(fields, indent=1) + "\n"


def loads(text: str | bytes) -> Manifest:
    """Raises `CheckpointError` where it is damaged, or of a version too far from ours."""
    try:
        fields = json.loads(text)
        theirs = version.parse(fields["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError("the manifest is damaged: it is not what a commit writes") from error
    try:
        if theirs is None:
            raise CheckpointError("the manifest names no version")
        version.check_stored("the checkpoint", theirs, version.CHECKPOINT)
        return _parse(fields)
    except ProtocolMismatch as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the manifest is damaged: {repr(error)[:200]}") from error


def _parse(fields: Mapping[str, Any]) -> Manifest:
    shards = tuple(
        Shard(
            rank=_number(shard["rank"]),
            file=_plain(shard["file"]),
            bytes=_number(shard["bytes"]),
            digest=_digest(shard["digest"]),
        )
        for shard in fields["shards"]
    )
    found = Manifest(
        job=_text(fields["job"]),
        sequence=_number(fields["sequence"]),
        round=_number(fields["round"]),
        step=_number(fields["step"]),
        world_size=_number(fields["world_size"]),
        value=_value(fields.get("value")),
        shards=shards,
    )
    if sorted(shard.rank for shard in shards) != list(range(len(shards))) or (
        len(shards) != found.world_size
    ):
        raise ValueError("it does not have one shard of each rank")
    return found


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is no number of 0 or more")
    return value


def _value(value: object) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{value!r} is no value")
    return float(value)  # type: ignore[arg-type]


def _digest(value: object) -> int:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r} is no checksum")
    return int(value, 16)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _plain(name: object) -> str:
    """A file in the step's own folder, and nowhere else."""
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"{name!r} is no name of a file")
    return name

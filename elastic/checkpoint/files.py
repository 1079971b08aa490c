"""A checkpoint's files, as a rank reads them: which steps are committed, and their shards, mapped."""

import mmap
import os
from pathlib import Path

from elastic.checkpoint.image import header_bytes, parse
from elastic.checkpoint.restore import Source
from elastic.checkpoint.slots import Moment
from elastic.proto import manifest, sums
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError


def committed(path: str, step: int | None = None) -> Moment | None:
    """The newest committed moment, or that of a step; what has no sound manifest is passed over."""
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return None
    found = [s for name in names if (s := manifest.step_of(name)) is not None]
    moments = []
    for number in found if step is None else [s for s in found if s == step]:
        try:
            known = read_manifest(path, number)
        except (OSError, CheckpointError):
            continue
        moments.append(Moment(known.round, known.step))
    return max(moments, default=None)


def read_manifest(path: str, step: int) -> manifest.Manifest:
    """Raises OSError, `CheckpointError`."""
    found = manifest.loads(Path(path, manifest.folder(step), manifest.NAME).read_bytes())
    if found.step != step:
        raise CheckpointError(f"the manifest in {manifest.folder(step)} is of step {found.step}")
    return found


def sources(path: str, step: int) -> tuple[dict[int, Source], list[str]]:
    """The shards of a committed step, by rank; and what is wrong with those that cannot be used.

    Raises OSError, `CheckpointError` where there is no sound manifest.
    """
    known = read_manifest(path, step)
    found: dict[int, Source] = {}
    wrong: list[str] = []
    for shard in known.shards:
        file = Path(path, manifest.folder(step), shard.file)
        try:
            found[shard.rank] = _source(file, shard)
        except (OSError, SlotError, CheckpointError, ProtocolMismatch) as error:
            wrong.append(f"{file}: {error}")
    return found, wrong


def _source(file: Path, shard: manifest.Shard) -> Source:
    with open(file, "rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != shard.bytes:
            raise CheckpointError(f"it has {size} bytes, {shard.bytes} were written")
        if not size:
            raise CheckpointError("it is no safetensors file: it is empty")
        data = memoryview(mmap.mmap(opened.fileno(), size, flags=mmap.MAP_PRIVATE))
    image = parse(bytes(data[: header_bytes(data[:8])]), size)
    table = data[image.sums_at :]
    if sums.checksum(table) != shard.digest:
        raise CheckpointError("its table of checksums is not the one that was written")
    chunks = sums.unpack(table, size)
    source = Source(where=str(file), image=image, data=data, chunks=chunks)
    if not source.intact(0, len(image.header)):
        raise CheckpointError("its header is damaged")
    return source

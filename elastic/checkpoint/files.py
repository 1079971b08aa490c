"""A checkpoint's files, as a rank reads them: the shards of a committed step, mapped."""

import mmap
import os
from pathlib import Path

from elastic.checkpoint import manifests
from elastic.checkpoint.image import header_bytes, parse
from elastic.checkpoint.restore import Mapped, Source
from elastic.proto import manifest, sums
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError


def sources(path: str, step: int) -> tuple[dict[int, Source], list[str]]:
    """The shards of a committed step, by rank; and what is wrong with those that cannot be used.

    Raises OSError, `CheckpointError` where there is no sound manifest.
    """
    known = manifests.read(path, step)
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
    source = Source(where=str(file), image=image, reader=Mapped(data), chunks=chunks)
    if not source.intact(0, len(image.header)):
        raise CheckpointError("its header is damaged")
    return source

"""Checksums of an image, chunk by chunk: the last bytes of a slot's image, of a file, of a replica.

The table has 16 bytes a chunk, little-endian: where it ends in the image (uint64), and the xxh3 of its
bytes (uint64). A chunk begins where the one before ends, and the table where the last one does.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from elastic.proto.errors import SlotError

ENTRY = 16
"""Bytes of the table for each chunk."""


class Chunk(NamedTuple):
    """A part of an image, from the end of the one before."""

    end: int
    checksum: int


def checksum(data: memoryview | bytes) -> int:
    """xxh3, of 64 bits."""
    return xxhash.xxh3_64_intdigest(data)


def pack(chunks: Sequence[Chunk]) -> bytes:
    """The table."""
    words = [word for chunk in chunks for word in chunk]
    return struct.pack(f"<{len(words)}Q", *words)


def unpack(table: memoryview | bytes, image_bytes: int) -> tuple[Chunk, ...]:
    """The chunks of an image of that many bytes, table included. Raises `SlotError` where they do not
    cover it."""
    if len(table) % ENTRY:
        raise SlotError(f"a table of checksums is damaged: {len(table)} bytes are no entries")
    words = struct.unpack(f"<{len(table) // 8}Q", table)
    chunks = tuple(map(Chunk, words[::2], words[1::2]))
    ends = [0, *(chunk.end for chunk in chunks)]
    if ends != sorted(ends) or ends[-1] != image_bytes - len(table):
        raise SlotError("a table of checksums is damaged: its chunks do not cover the image")
    return chunks

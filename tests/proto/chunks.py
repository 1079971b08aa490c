"""What tests ask of an image."""

from collections.abc import Sequence

from elastic.proto.sums import Chunk, checksum


def damaged(image: memoryview, chunks: Sequence[Chunk]) -> list[int]:
    """The chunks that are not the bytes that were written, by number."""
    starts = (0, *(chunk.end for chunk in chunks))
    return [
        index
        for index, (start, (end, expected)) in enumerate(zip(starts, chunks, strict=False))
        if checksum(image[start:end]) != expected
    ]

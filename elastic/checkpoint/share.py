"""What of a state this rank writes, and how others can tell that they hold the same. Pure."""

from collections.abc import Iterable, Mapping, Sequence

import xxhash

from elastic.checkpoint.image import Image
from elastic.checkpoint.state import Part, Place
from elastic.proto.slot import MOST_UNITS
from elastic.proto.sums import Chunk


def mine(parts: Iterable[Part], place: Place) -> list[Part]:
    """The parts that this rank writes: of what several ranks of a node hold equal, each a share.

    Every rank of a node comes to the same shares without asking another.
    """
    groups: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        holders = tuple(rank for rank in part.holders if rank in place.node)
        if place.rank in holders:
            groups.setdefault(holders, []).append(part)
    return [
        part for holders, group in groups.items() for part in _shares(group, holders)[place.rank]
    ]


def _shares(group: Sequence[Part], holders: tuple[int, ...]) -> dict[int, list[Part]]:
    """The largest first, each to the holder that has the least."""
    shares: dict[int, list[Part]] = {rank: [] for rank in holders}
    load = dict.fromkeys(holders, 0)
    for part in sorted(group, key=lambda part: (-part.piece.nbytes, part.piece.name)):
        rank = min(holders, key=lambda rank: (load[rank], rank))
        shares[rank].append(part)
        load[rank] += part.piece.nbytes
    return shares


def units(
    image: Image, holders: Mapping[str, tuple[int, ...]], chunks: Sequence[Chunk]
) -> tuple[int, ...]:
    """Digests of what an image holds: who has an image with the same unit has the same bytes.

    holders: by a piece's name. What several ranks keep equal goes by names and places, all else by
    its checksums as well.
    """
    digests: dict[tuple[int, ...], xxhash.xxh3_64] = {}
    spans = {name: (start, end) for name, start, end in image.spans()}
    sums = _sums(image, chunks)
    for name in sorted(image.pieces):
        piece, ranks = image.pieces[name], holders[name]
        shared = len(ranks) > 1
        digest = digests.setdefault(ranks if shared else (), xxhash.xxh3_64())
        digest.update(repr((ranks if shared else (), piece)).encode())
        if not shared and piece.nbytes:  # an empty one begins where another does
            digest.update(repr(sums[spans[name][0]]).encode())
    values = xxhash.xxh3_64_intdigest(
        repr((sums.get(image.values_at, ()), sorted(image.ties.items()))).encode()
    )
    found = sorted({values, *(digest.intdigest() for digest in digests.values())})
    if len(found) > MOST_UNITS:
        rest = xxhash.xxh3_64_intdigest(repr(found[MOST_UNITS - 1 :]).encode())
        found = [*found[: MOST_UNITS - 1], rest]
    return tuple(found)


def _sums(image: Image, chunks: Sequence[Chunk]) -> dict[int, tuple[int, ...]]:
    """The checksums of what begins at each place."""
    found: dict[int, tuple[int, ...]] = {}
    ends = {end: start for _, start, end in image.spans() if start < end}
    current: list[int] = []
    for chunk in chunks:
        current.append(chunk.checksum)
        if chunk.end in ends:
            found[ends[chunk.end]] = tuple(current)
            current = []
    return found

"""What of a state this rank writes, and how others can tell that they hold the same. Pure."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import Layout
from elastic.checkpoint.state.tensors import Part
from elastic.proto.slot import MOST_BELIEFS, MOST_UNITS, Belief
from elastic.proto.sums import Chunk

Groups = Mapping[tuple[int, ...], Sequence[Part]]
"""Parts by the ranks of this node that hold them, in order."""


def groups(parts: Iterable[Part], place: Place) -> dict[tuple[int, ...], list[Part]]:
    """The parts that this rank has something to do with, those in more groups than a slot has room for
    beliefs as if nobody else held them."""
    found: dict[tuple[int, ...], list[Part]] = {}
    for part in parts:
        holders = tuple(rank for rank in part.holders if rank in place.node)
        if place.rank in holders:
            if holders not in found and len(found) >= MOST_BELIEFS:
                holders = (place.rank,)
            found.setdefault(holders, []).append(part)
    return found


def mine(groups: Groups, rank: int) -> list[Part]:
    """The parts that this rank writes: of what several ranks of a node hold equal, each a share.

    Every rank of a node comes to the same shares without asking another, if they hold the same.
    """
    return [part for holders, group in groups.items() for part in _shares(group, holders)[rank]]


def _shares(group: Sequence[Part], holders: tuple[int, ...]) -> dict[int, list[Part]]:
    """The largest first, each to the holder that has the least."""
    shares: dict[int, list[Part]] = {rank: [] for rank in holders}
    load = dict.fromkeys(holders, 0)
    for part in sorted(group, key=lambda part: (-part.piece.nbytes, part.piece.name)):
        rank = min(holders, key=lambda rank: (load[rank], rank))
        shares[rank].append(part)
        load[rank] += part.piece.nbytes
    return shares


def alone(part: Part, place: Place) -> Part:
    """As if nobody else held it."""
    return part._replace(holders=(place.rank,))


def shared(parts: Iterable[Part], ties: Mapping[str, str]) -> dict[tuple[int, ...], dict[str, str]]:
    """What this rank holds in common with others: by those ranks, the names in order, and a digest of
    what each is to this rank."""
    tied: dict[str, list[str]] = {}
    for name, other in ties.items():
        tied.setdefault(other, []).append(name)
    found: dict[tuple[int, ...], dict[str, str]] = {}
    for part in sorted(parts, key=lambda part: part.piece.name):
        if len(part.holders) > 1:
            one = part.piece
            what = f"{one.dtype} {one.shape} {one.offset} {one.extent} {sorted(tied.get(one.name, ()))}"
            digest = xxhash.xxh3_64_hexdigest(what.encode())[:8]
            found.setdefault(part.holders, {})[one.name] = digest
    return found


def beliefs(
    groups: Groups, common: Mapping[tuple[int, ...], Mapping[str, str]]
) -> tuple[Belief, ...]:
    """What this rank relies on others of its node to have as well. common: what `shared` says."""
    digests = {name: digest for names in common.values() for name, digest in names.items()}
    found: list[Belief] = []
    for holders, group in groups.items():
        if len(holders) > 1:
            held = sorted((p.piece.name, p.holders, digests[p.piece.name]) for p in group)
            digest = xxhash.xxh3_64_intdigest(repr((holders, held)).encode())
            found.append(Belief(digest, len(holders)))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Digests of what images of a layout hold: who has an image with the same unit has the same bytes.

    What several ranks keep equal goes by names and places, all else by its checksums as well.
    """

    known: tuple[int, ...]
    """Those that do not depend on bytes."""
    own: xxhash.xxh3_64 | None
    """Of the names and places of what is this rank's alone."""
    chunks: tuple[int, ...]
    """Where their checksums are."""
    ties: xxhash.xxh3_64
    values: int
    """Where the checksums of what is no tensor begin."""

    def of(self, chunks: Sequence[Chunk]) -> tuple[int, ...]:
        values = self.ties.copy()
        values.update(array("Q", [chunk.checksum for chunk in chunks[self.values :]]))
        found = {values.intdigest(), *self.known}
        if self.own is not None:
            own = self.own.copy()
            own.update(array("Q", [chunks[number].checksum for number in self.chunks]))
            found.add(own.intdigest())
        order = sorted(found)
        if len(order) > MOST_UNITS:
            rest = xxhash.xxh3_64_intdigest(repr(order[MOST_UNITS - 1 :]).encode())
            order = [*order[: MOST_UNITS - 1], rest]
        return tuple(order)


def units(layout: Layout, holders: Mapping[str, tuple[int, ...]]) -> Units:
    """holders: by a piece's name."""
    first, counts = layout.chunks
    spans: dict[str, range] = {}
    for (name, *_), count in zip(layout.data, counts, strict=True):
        spans[name] = range(first, first + count)
        first += count
    digests: dict[tuple[int, ...], xxhash.xxh3_64] = {}
    chunks: list[int] = []
    for name in sorted(layout.pieces):
        ranks = holders[name] if len(holders[name]) > 1 else ()
        digest = digests.setdefault(ranks, xxhash.xxh3_64())
        digest.update(repr((ranks, layout.pieces[name])).encode())
        if not ranks:
            chunks += spans[name]
    own = digests.pop((), None)
    return Units(
        known=tuple(digest.intdigest() for digest in digests.values()),
        own=own,
        chunks=tuple(chunks),
        ties=xxhash.xxh3_64(repr(sorted(layout.ties.items())).encode()),
        values=first,
    )

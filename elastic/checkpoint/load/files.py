"""A checkpoint's files, as a rank reads them: the newest step of which all is there, and its shards."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elastic.checkpoint.load import plan
from elastic.checkpoint.load.source import Source
from elastic.checkpoint.state.image import header_bytes, parse
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.protocol import LOOKS, Storage, lasting, words
from elastic.proto import manifest, sums
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.manifest import Manifest

FIRST = 64 << 10
"""Bytes that are read of a shard at first: the header of most."""
NAMED = 5
"""Things that are wrong with a storage that has nothing to load, which one error names."""


def newest(
    storage: Storage, step: int | None = None, *, unfit: Callable[[Manifest], str] = lambda _: ""
) -> tuple[Manifest | None, list[str]]:
    """The step that was committed last of which all is there, or that step; and what is wrong with
    what was passed over for it.

    unfit: why a step is not to be taken, though it looks whole; empty: it may be. Of each shard its size, header and table of checksums are looked at, not its tensors. Where no step
    is whole it is the one that was committed last. Raises OSError where the storage, or a file that the
    step found may owe its place to, cannot be looked at now, and `CheckpointError` where it has steps and none of them can be taken.
    """
    away: list[str] = []
    steps = [s for s, names in storage.listing().items() if manifest.NAME in names]
    found, wrong = manifests.readable(storage, [s for s in steps if step in (None, s)], away)
    if away:  # which may be the newest
        raise OSError("; ".join(away[:NAMED]))
    bad = [why for one in found if (why := unfit(one))]
    found = [one for one in found if not unfit(one)]
    if not found and (wrong or bad):
        raise CheckpointError("; ".join((bad + wrong)[:NAMED]))
    for known in found:
        sources, damaged = _sources(storage, known, away)
        wrong += damaged
        if not damaged or covered(list(sources.values())):
            return known, wrong
        if away:
            raise OSError("; ".join(away[:NAMED]))
    return (found[0] if found else None), wrong


def covered(sources: list[Source]) -> bool:
    """Whether these shards have all of every tensor that any of them knows of."""
    held = plan.index((n, source.image.pieces.values()) for n, source in enumerate(sources))
    names = set(held)
    for source in sources:
        ties = source.image.ties
        try:
            source.values(names.add)
        except (OSError, CheckpointError):
            return False
        names = {ties.get(name, name) for name in names}
    if not names or not names <= held.keys():
        return False
    wholes = (held[name][0][1] for name in names)
    _, missing = plan.plan((piece.logical for piece in wholes if 0 not in piece.shape), held)
    return not missing


def older(storage: Storage, step: int) -> int | None:
    """The step that can be taken in the place of one that cannot be loaded."""
    try:
        steps = [s for s, names in storage.listing().items() if manifest.NAME in names and s < step]
    except OSError:
        return None
    return max(steps, default=None)


def sources(
    storage: Storage, step: int, away: list[str] | None = None
) -> tuple[dict[int, Source], list[str]]:
    """The shards of a committed step, by rank; and what is wrong with those that cannot be used.

    away: takes what of that may be no fault of theirs. Raises OSError, `CheckpointError` where there is no sound manifest.
    """
    return _sources(storage, manifests.read(storage, step), away)


def _sources(
    storage: Storage, known: Manifest, away: list[str] | None = None
) -> tuple[dict[int, Source], list[str]]:
    def look(shard: manifest.Shard) -> Source | str:
        where = manifests.where(storage, known.step, shard.file)
        try:
            return _source(storage, known.step, shard, where)
        except (OSError, SlotError, CheckpointError, ProtocolMismatch) as error:
            why = f"{where}: {words(error)}"
            if away is not None and not lasting(error):
                away.append(why)
            return why

    with ThreadPoolExecutor(LOOKS) as pool:
        looked = list(zip(known.shards, pool.map(look, known.shards), strict=True))
    found = {shard.rank: one for shard, one in looked if isinstance(one, Source)}
    return found, [one for _, one in looked if isinstance(one, str)]


def _source(storage: Storage, step: int, shard: manifest.Shard, where: str) -> Source:
    file = storage.open(step, shard.file)
    if file.size != shard.bytes:
        raise CheckpointError(f"it has {file.size} bytes, {shard.bytes} were written")
    if not file.size:
        raise CheckpointError("it is no safetensors file: it is empty")
    header = bytes(file.read(0, min(FIRST, file.size)))
    length = header_bytes(header)
    if length > len(header):
        header += file.read(len(header), min(length, file.size))
    image = parse(header[:length], file.size)
    table = file.read(image.sums_at, file.size)
    if sums.checksum(table) != shard.digest:
        raise CheckpointError("its table of checksums is not the one that was written")
    chunks = sums.unpack(table, file.size)
    source = Source(where=where, image=image, reader=file, chunks=chunks)
    if not source.intact(0, len(image.header)):
        raise CheckpointError("its header is damaged")
    return source

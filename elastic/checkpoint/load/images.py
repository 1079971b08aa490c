"""Images in this node's slots, as a rank reads them."""

import functools
from collections.abc import Sequence

from elastic.checkpoint.load.source import Mapped, Source
from elastic.checkpoint.memory import host
from elastic.checkpoint.state.image import Image, header_bytes, parse
from elastic.proto import slot
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.moment import Moment


def sources(fds: Sequence[int], moment: Moment) -> tuple[dict[int, Source], dict[int, str]]:
    """What the slots hold of a moment, by rank; and what is wrong with images that cannot be used."""
    found: dict[int, Source] = {}
    wrong: dict[int, str] = {}
    for fd in fds:
        try:
            snapshot = slot.read(host.shared(fd))
        except (SlotError, ProtocolMismatch):
            continue
        if Moment(snapshot.stamp.round, snapshot.stamp.step) != moment:
            continue
        where = f"the slot of rank {snapshot.stamp.rank}"
        try:
            found[snapshot.stamp.rank] = _source(where, snapshot)
        except (CheckpointError, ProtocolMismatch) as error:
            wrong[snapshot.stamp.rank] = f"{where}: {error}"
    return found, wrong


def _source(where: str, snapshot: slot.Snapshot) -> Source:
    length = header_bytes(snapshot.image[:8])
    image = _parsed(bytes(snapshot.image[:length]), len(snapshot.image))
    source = Source(where=where, image=image, reader=Mapped(snapshot.image), chunks=snapshot.chunks)
    if not source.intact(0, len(image.header)):
        raise CheckpointError("its header is damaged")
    return source


@functools.lru_cache(maxsize=16)  # a run looks at what it goes on from before it loads it
def _parsed(header: bytes, size: int) -> Image:
    return parse(header, size)

"""How a rank gets the state that it was told to load, from the nearest place that has it."""

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from elastic.checkpoint import files, images, storage
from elastic.checkpoint.image import header_bytes, parse
from elastic.checkpoint.peers import Peer, head
from elastic.checkpoint.restore import Restore, Source
from elastic.checkpoint.state import Place
from elastic.checkpoint.storage import Storage
from elastic.proto import courier, keeper
from elastic.proto.errors import CheckpointError, ProtocolMismatch, SlotError
from elastic.proto.manifest import Manifest
from elastic.proto.moment import Moment

log = logging.getLogger(__name__)


def stored(path: str, where: Storage, step: int | None) -> tuple[Manifest | None, str]:
    """What storage has to load, as rank 0 sees it for all; and why that cannot be told."""
    try:
        found, wrong = files.newest(where, step)
    except (OSError, CheckpointError) as error:
        return None, f"{path}: {storage.words(error)}"
    for complaint in wrong:
        log.error("%s", complaint)
    return found, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """One, of a moment that is chosen. All methods raise `CheckpointError`."""

    path: str
    storage: Storage
    place: Place
    moment: Moment
    strict: bool
    """What the state has and the checkpoint has not is an error."""
    only: Collection[str] | None
    """What is loaded, by names or their beginnings; None: all."""

    def from_memory(
        self, state: dict[str, Any], fds: Sequence[int], elsewhere: keeper.Sources | None
    ) -> None:
        """From the slots of this node, and from other nodes what it has not; their second copies are
        asked only for what turns out to be damaged here."""
        found, damaged = images.sources(fds, self.moment)
        lost = damaged.get(self.place.rank, "")
        for complaint in damaged.values():
            log.error("%s", complaint)
        with ExitStack() as opened:
            needed = self._peers(elsewhere, opened, needed=True)
            try:
                self._apply({**needed, **found}, state, lost)
            except CheckpointError as error:
                second = self._peers(elsewhere, opened, needed=False)
                if not second:
                    raise
                log.error("%s: other nodes have copies", error)
                self._apply({**found, **needed, **second}, state, lost)

    def from_files(self, state: dict[str, Any]) -> None:
        try:
            found, wrong = files.sources(self.storage, self.moment.step)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {storage.words(error)}") from error
        for complaint in wrong:
            log.error("%s", complaint)
        same_world = len(found) + len(wrong) == self.place.world_size
        damaged = list(wrong)
        try:
            lost = "; ".join(wrong) if same_world else ""
            self._apply(found, state, lost, damaged)
        except CheckpointError as error:
            if not damaged:
                raise
            older = files.older(self.storage, self.moment.step)
            raise CheckpointError(f"{error}{older}") from error

    def _apply(
        self,
        found: Mapping[int, Source],
        state: dict[str, Any],
        lost: str,
        damaged: list[str] | None = None,
    ) -> None:
        """From images by rank, the own one first. lost: what is wrong with the own image where it cannot
        be used; damaged: takes what else is found to be."""
        own = self.place.rank
        if lost and own not in found:  # nobody can tell who else has the values that were in it
            raise CheckpointError(f"{lost}: what rank {own} alone had is lost")
        order = sorted(found, key=lambda rank: (rank != own, rank))
        restore = Restore([found[rank] for rank in order], self.place, self.only)
        try:
            restore.apply(state, strict=self.strict)
        finally:
            if damaged is not None:
                damaged += restore.damaged
            for complaint in restore.damaged:
                log.error("%s", complaint)

    def _peers(
        self, elsewhere: keeper.Sources | None, opened: ExitStack, *, needed: bool
    ) -> dict[int, Source]:
        """Images in the memory of other nodes, by rank, until `opened` ends; without those that cannot
        be had, of which others may have copies."""
        if elsewhere is None:
            return {}
        where = {
            rank: courier.address(source.base, self.path, self.moment, rank)
            for source in elsewhere.sources
            for rank in source.ranks
            if source.needed == needed
        }

        def look(rank: int) -> Source | None:
            try:
                peer = Peer(where[rank], elsewhere.tls)
                opened.callback(peer.close)
                return _remote(peer, rank)
            except (OSError, CheckpointError) as error:
                log.error("%s", error)
                return None

        with ThreadPoolExecutor(8) as pool:
            found = dict(zip(where, pool.map(look, where), strict=True))
        return {rank: source for rank, source in found.items() if source is not None}


def _remote(peer: Peer, rank: int) -> Source:
    """An image in another node's memory. Raises `CheckpointError`."""
    where = f"the memory of another node (rank {rank})"
    try:
        _, found, chunks = head(peer)
        length = header_bytes(peer.read(0, 8))
        image = parse(bytes(peer.read(0, length)), found.image_bytes)
        source = Source(where=where, image=image, reader=peer, chunks=chunks)
        if not source.intact(0, length):
            raise SlotError("its header is damaged")
    except (OSError, SlotError, ProtocolMismatch) as error:
        raise CheckpointError(f"{where}: {error}") from error
    return source

"""How a rank gets the state that it was told to load, from the nearest place that has it."""

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Event
from typing import Any

from elastic.checkpoint.load import files, images
from elastic.checkpoint.load.peers import Peer, head
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.load.source import Source
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.state.image import header_bytes, parse
from elastic.checkpoint.storage.protocol import Storage, lasting, words
from elastic.proto import courier, keeper
from elastic.proto.errors import (
    CheckpointDamaged,
    CheckpointError,
    ProtocolMismatch,
    SlotError,
)
from elastic.proto.manifest import Manifest
from elastic.proto.moment import Moment

log = logging.getLogger(__name__)


PAUSES = (1.0, 3.0, 9.0)
"""Seconds between tries to look at a storage: a network may be away for a moment."""


def looked(
    path: str, where: Storage, step: int | None, job: str, damaged: Sequence[keeper.Bad]
) -> keeper.Looked:
    """What storage has to load, as rank 0 of that job sees it for all; without what turned out to be
    damaged."""

    def why(one: Manifest) -> str:
        round_ = one.round if one.job == job else 0
        found = (
            bad.what
            for bad in damaged
            if bad.round == round_ and (bad.step == one.step or (bad.later and bad.step < one.step))
        )
        return next(found, "")

    for pause in (*PAUSES, None):
        try:
            found, wrong = files.newest(where, step, unfit=why)
            break
        except (OSError, CheckpointError) as error:
            complaint = f"{path}: {words(error)}"
            if pause is None or lasting(error):
                return keeper.Looked(error=complaint)
            log.warning("%s: trying again in %g s", complaint, pause)
            Event().wait(pause)
    for complaint in wrong:
        log.error("%s", complaint)
    if found is None:
        return keeper.Looked()
    return keeper.Looked(job=found.job, round=found.round, step=found.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """One, of a moment that is chosen. All methods raise `CheckpointError`, and of these
    `CheckpointDamaged` where another try would find the same."""

    path: str
    storage: Storage
    place: Place
    moment: Moment
    strict: bool
    """What the state has and the checkpoint has not is an error; it is one always where not all of that can be used."""
    only: Collection[str] | None
    """What is loaded, by names or their beginnings; None: all."""

    def from_memory(
        self, state: dict[str, Any], fds: Sequence[int], elsewhere: keeper.Sources | None
    ) -> None:
        """From the slots of this node, and from other nodes what it has not; their second copies are
        asked only for what turns out to be damaged here."""
        found, damaged = images.sources(fds, self.moment)
        wrong, away = list(damaged.values()), dict[int, str]()
        for complaint in wrong:
            log.error("%s", complaint)
        lost = damaged.get(self.place.rank, "")
        with ExitStack() as opened:
            needed = self._peers(elsewhere, opened, away, needed=True)
            short = (damaged.keys() | away.keys()) - needed.keys()
            try:
                self._apply({**needed, **found}, state, lost, wrong, away, short=bool(short))
            except CheckpointError as error:
                second = self._peers(elsewhere, opened, away, needed=False)
                if not second:
                    raise
                log.error("%s: other nodes have copies", error)
                short = (damaged.keys() | away.keys()) - needed.keys() - second.keys()
                found = {**found, **needed, **second}
                try:
                    self._apply(found, state, lost, wrong, away, short=bool(short))
                except CheckpointError as again:
                    if isinstance(error, CheckpointDamaged):  # whoever may be away, this is damage
                        raise error from again
                    raise

    def from_files(self, state: dict[str, Any]) -> None:
        away: list[str] = []
        try:
            found, wrong = files.sources(self.storage, self.moment.step, away)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {words(error)}") from error
        for complaint in wrong:
            log.error("%s", complaint)
        same_world = len(found) + len(wrong) == self.place.world_size
        lost = "; ".join(wrong) if same_world else ""
        self._apply(found, state, lost, wrong, away, short=bool(wrong))

    def _apply(
        self,
        found: Mapping[int, Source],
        state: dict[str, Any],
        lost: str,
        wrong: Sequence[str],
        away: Collection[object],
        *,
        short: bool,
    ) -> None:
        """From images by rank, the own one first. lost: what is wrong with the own image where it cannot
        be used; wrong: with any; away: those that may be sound all the same; short: of some there is no copy."""
        own = self.place.rank
        if lost and own not in found:  # nobody can tell who else has the values that were in it
            kind = CheckpointError if away else CheckpointDamaged
            raise kind(f"{lost}: what rank {own} alone had is lost")
        order = sorted(found, key=lambda rank: (rank != own, rank))
        restore = Restore([found[rank] for rank in order], self.place, self.only)
        try:
            # What is not there may be in what cannot be used.
            restore.apply(state, strict=self.strict or short)
        except CheckpointError as error:
            if away or restore.away or not (wrong or restore.damaged):
                raise
            named = [one for one in wrong if one not in str(error)]
            raise CheckpointDamaged("; ".join((str(error), *named))) from error
        finally:
            for complaint in restore.damaged:
                log.error("%s", complaint)

    def _peers(
        self,
        elsewhere: keeper.Sources | None,
        opened: ExitStack,
        away: dict[int, str],
        *,
        needed: bool,
    ) -> dict[int, Source]:
        """Images in the memory of other nodes, by rank, until `opened` ends; without those that cannot
        be had, of which others may have copies. away: takes why, by rank."""
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
                away[rank] = str(error)
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

"""What a rank writes of its state: planned once, and kept while the state is laid out the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic.checkpoint.state import share
from elastic.checkpoint.state.collect import Collected, Place, collect
from elastic.checkpoint.state.image import Image, Layout, Piece
from elastic.checkpoint.state.share import Units
from elastic.checkpoint.state.tensors import Known
from elastic.proto.slot import Belief


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank writes of a state."""

    image: Image
    tensors: dict[str, torch.Tensor]
    values: bytes
    units: Units
    beliefs: tuple[Belief, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    pieces: list[Piece]
    """All of the state that it is for, in order."""
    holders: list[tuple[int, ...]]
    ties: dict[str, str]
    apart: bool
    layout: Layout
    """Of what this rank writes."""
    units: Units
    beliefs: tuple[Belief, ...]


class Planner:
    """Of one rank and one checkpoint."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._known: dict[str, Known] = {}
        self._plan: _Plan | None = None
        self.apart = False
        """Write all that this rank has, since others of the node do not have the same."""

    def share(self, state: Mapping[str, Any]) -> Share:
        """Raises `CheckpointError` for what a checkpoint cannot keep."""
        collected = collect(state, self._place, self._known)
        parts = collected.parts
        pieces = [part.piece for part in parts.values()]
        holders = [part.holders for part in parts.values()]
        plan = self._plan
        if (
            plan is None
            or plan.apart != self.apart
            or plan.pieces != pieces
            or plan.holders != holders
            or plan.ties != collected.ties
        ):
            self._known = {name: self._known[name] for name in parts | collected.ties}
            plan = self._plan = self._made(collected, pieces, holders)
        values = collected.values.encode()
        return Share(
            image=plan.layout.image(len(values)),
            tensors={name: parts[name].tensor for name in plan.layout.pieces},
            values=values,
            units=plan.units,
            beliefs=plan.beliefs,
        )

    def _made(
        self, collected: Collected, pieces: list[Piece], holders: list[tuple[int, ...]]
    ) -> _Plan:
        parts = list(collected.parts.values())
        if self.apart:
            parts = [share.alone(part, self._place) for part in parts if part.holders]
        groups = share.groups(parts, self._place)
        common = share.shared(parts, collected.ties)
        mine = {part.piece.name: part for part in share.mine(groups, self._place.rank)}
        ties = {name: other for name, other in collected.ties.items() if other in mine}
        layout = Layout([part.piece for part in mine.values()], ties, common)
        return _Plan(
            pieces=pieces,
            holders=holders,
            ties=collected.ties,
            apart=self.apart,
            layout=layout,
            units=share.units(layout, {name: part.holders for name, part in mine.items()}),
            beliefs=share.beliefs(groups, common),
        )

"""Which files of a checkpoint are deleted: those of steps that no rule keeps, and what a crash left.
Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from elastic.proto import manifest
from elastic.proto.manifest import Manifest
from elastic.proto.terms import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A committed step, as far as deleting it goes."""

    step: int
    sequence: int
    """Grows with each commit."""
    round: int = 0
    value: float | None = None
    pinned: bool = False


def spent(stored: Sequence[Stored], rules: Retention) -> list[int]:
    """The steps to be deleted, the oldest first: never the newest one or one beyond it, never one that is
    pinned.

    No rule counts void steps; they go once what `last` keeps is all beyond them. Which step was gone back
    to is not known here, only that it is not void: so until `last` are committed since, none of those goes.
    """
    if not (rules.last or rules.every or rules.best):
        return []
    order = sorted(stored, key=lambda one: (one.sequence, one.round, one.step))
    void = _void(order)
    line = [one for one in order if one.step not in void]
    since = list(takewhile(lambda one: one.step not in void, reversed(order)))
    count = max(1, rules.last)
    last = {one.step for one in (since[:count] if len(since) >= count else line)}
    sign = -1 if rules.highest else 1
    valued = [(sign * one.value, -one.sequence, one.step) for one in line if one.value is not None]
    kept = last | {one.step for one in order if one.pinned}
    kept |= {step for step in void if step > min(last)}
    kept |= {one.step for one in line if rules.every and one.step % rules.every == 0}
    kept |= {step for _, _, step in sorted(valued)[: rules.best]}
    return [one.step for one in order if one.step not in kept]


def _void(order: Sequence[Stored]) -> set[int]:
    """Steps beyond one that was committed later: somebody went back behind them. order: of the commits."""
    void: set[int] = set()
    lowest = math.inf
    for one in reversed(order):
        if one.step > lowest:
            void.add(one.step)
        lowest = min(lowest, one.step)
    return void


def leftovers(
    listing: Mapping[int, Collection[str]], known: Iterable[Manifest], newest: Manifest
) -> dict[int, list[str]]:
    """What nobody needs or writes any more, by step: shards and drafts that are in no manifest and
    older than the newest commit. A step whose folder is empty has an empty list.

    listing: the names of all steps' files. known: the manifests that could be read; a step that has one
    which could not be read is left alone, and so is one that is pinned.
    """
    needed = {one.step: {shard.file for shard in one.shards} for one in known}
    found: dict[int, list[str]] = {}
    for step, names in listing.items():
        if step not in needed and not {manifest.NAME, manifest.PIN}.isdisjoint(names):
            continue
        left = set(ours(names)) - needed.get(step, set())
        gone = sorted(name for name in left if _old(name, step, newest))
        if gone or (not names and step < newest.step):
            found[step] = gone
    return found


def ours(names: Iterable[str]) -> list[str]:
    """Shards and drafts, of whatever job."""
    drafts = tuple(manifest.draft(name, "") for name in (manifest.NAME, manifest.PIN))
    return sorted(n for n in names if manifest.written_in(n) or n.startswith(drafts))


def _old(name: str, step: int, newest: Manifest) -> bool:
    """It is of a moment before the newest commit; by the step alone where another job wrote it."""
    written = manifest.written_in(name)
    if written is not None and written[1] == newest.job[:8]:
        return (written[0], step) < newest.moment
    return step < newest.step

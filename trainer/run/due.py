"""What is due behind a step: to save it, on storage, too, and to end. Pure.

A number is due when it has been passed since the last step that was settled, so what falls on a step that the guard
holds is made up for by the first one behind it, and what a run that goes back takes back is due again in its turn. Who
begins again from a checkpoint comes to the same: it is of a settled step.
"""

from dataclasses import dataclass

from elastic.trainer.arguments.checkpointing import CheckpointFlags


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """Behind one step."""

    settle: bool
    """It is saved, where anything is."""
    persist: bool
    """On storage, too."""
    end: bool
    """The run ends, as it was asked to."""


def due(step: int, settled: int, flags: CheckpointFlags, *, holds: bool, over: bool) -> Due:
    """settled: the last step that was; a run that has gone back further computes the steps up to it again, and a
    checkpoint's steps only grow. holds: the run may have to go back before `step`. over: its time is."""
    settles = not holds and step > settled

    def passed(interval: int | None) -> bool:
        return interval is not None and step // interval > settled // interval

    return Due(
        settle=settles,
        persist=settles and passed(flags.save_interval),
        end=settles and (over or passed(flags.exit_interval)),
    )

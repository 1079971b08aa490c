"""Flash checkpoints: `Checkpointer` saves into memory that outlives the rank, and loads from there."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":  # the flusher, which is in here as well, needs no torch
        from elastic.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

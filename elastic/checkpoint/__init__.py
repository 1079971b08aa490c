"""Flash checkpoints: `Checkpointer` saves into memory that outlives the rank, and loads from there."""

from elastic.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]

"""The run that this process is in, for scripts that ask Megatron's way: `get_args()`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.arguments.settings import Settings
from elastic.trainer.data.gpt_dataset import GPTDataset
from elastic.trainer.data.tokenizers import Tokenizer
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.layout import Laid, Part
from elastic.trainer.watch import sources
from elastic.trainer.watch.timers import Timers


@dataclass(slots=True)
class Current:
    """What is known of it so far."""

    settings: Settings
    tokenizer: Tokenizer
    config: GPTConfig
    args: Any
    """As Megatron has them."""
    timers: Timers
    sources: Sequence[str] = ()
    """What is blended in the data that are read is called; empty where they are not ours."""
    part: Part | None = None
    """Of the model, while it is made."""
    laid: Laid | None = None
    """The model and its ranks, from when it is laid out."""


_current: Current | None = None


def set_current(found: Current | None) -> None:
    """By `pretrain`, once, and for a rehearsal before it."""
    global _current
    _current = found


@contextmanager
def reading(dataset: Any) -> Iterator[None]:
    """As long as samples of `dataset` are run: their losses are told by its sources."""
    run = current()
    before, blended = run.sources, dataset.sources if isinstance(dataset, GPTDataset) else ()
    run.sources = sources.names([one.name for one in blended])
    try:
        yield
    finally:
        run.sources = before


def current() -> Current:
    """Raises `UsageError` before `pretrain` has read the arguments."""
    if _current is None:
        raise UsageError("there is no run yet: only what `pretrain` calls may ask for it")
    return _current

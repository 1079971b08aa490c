"""A state from storage alone, or to it: no job, no other rank, for programs that use what was trained, or
that make something to train on."""

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from elastic.checkpoint.load import files
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.save import writing
from elastic.checkpoint.state.collect import Place, collect
from elastic.checkpoint.state.image import lay_out
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import canonical
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError

log = logging.getLogger(__name__)


class Stored:
    """A committed step, of which single things are read."""

    def __init__(self, path: str | os.PathLike[str], step: int) -> None:
        """Raises `CheckpointError` where its manifest is damaged, OSError."""
        sources, wrong = files.sources(connect(canonical(path)), step)
        self._sources = [sources[rank] for rank in sorted(sources)]
        self._restore = Restore(self._sources, Place())
        self._told: set[str] = set()
        self._complain(wrong)
        self.step = step

    def has(self, key: str) -> bool:
        """Whether the state that was saved had it, at the top."""
        return self._restore.has(key)

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` names. Raises `CheckpointError` for what the step has not, or only damaged."""
        restore = Restore(self._sources, Place())
        restore.apply(state, strict=True)
        self._complain(restore.damaged)

    def tensor(self, name: str) -> torch.Tensor:
        """One, by its name ("model.head.weight"), whole, on the CPU. Raises `CheckpointError` likewise."""
        found = self._restore.one(name)
        self._complain(self._restore.damaged)
        return found

    def _complain(self, complaints: Iterable[str]) -> None:
        for complaint in complaints:
            if complaint not in self._told:
                self._told.add(complaint)
                log.error("%s", complaint)


def load(path: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None) -> int:
    """Load what `state` names from the step that was committed last, or from `step`; returns it.

    0 where there is none: the state is as it was. What the checkpoint has beside that is not read.
    Raises `CheckpointError` for what it has not, or only damaged.
    """
    found = manifests.committed(connect(canonical(path)), step)
    if found is None:
        return 0
    Stored(path, found.step).load(state)
    return found.step


def save(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    step: int,
    tensors: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> None:
    """Write `state` as a step of its own, the newest.

    tensors: by name ("model.head.weight"), what gets a tensor when its bytes are wanted, in the place of
    the state's, which then need never be filled: a state may be larger than memory. Raises
    `CheckpointError` where there is such a step or the state is none that can be kept, OSError.
    """
    storage = connect(canonical(path))
    if manifests.committed(storage, step) is not None:
        raise CheckpointError(f"{path} has a step {step} already: name another")
    collected = collect(state, Place())
    given: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(_itself, part.tensor) for name, part in collected.parts.items()
    }
    values = collected.values.encode()
    image = lay_out([part.piece for part in collected.parts.values()], collected.ties, len(values))
    job = uuid.uuid4().hex
    name = manifest.file(0, 1, 0, job)
    try:
        wanted = given | dict(tensors or {})
        shard = writing.write_image(storage, step, name, 0, image, wanted, values)
        writing.commit(storage, step, job, [shard])
    except BaseException:
        with contextlib.suppress(OSError):
            storage.delete(step, [name])
            storage.drop(step)
        raise


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor

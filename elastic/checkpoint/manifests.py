"""Which steps of a checkpoint are committed on a file system. Needs no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from elastic.proto.manifest import Manifest


def committed(path: str | os.PathLike[str], step: int | None = None) -> Manifest | None:
    """The one that was committed last, or that of a step; one that is not sound is passed over."""
    return max(_sound(path, step), key=lambda found: found.sequence, default=None)


def _sound(path: str | os.PathLike[str], step: int | None) -> Iterator[Manifest]:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return
    for name in names:
        number = manifest.step_of(name)
        if number is not None and step in (None, number):
            try:
                yield read(path, number)
            except (OSError, CheckpointError):
                continue


def read(path: str | os.PathLike[str], step: int) -> Manifest:
    """A step's. Raises OSError, `CheckpointError`."""
    found = manifest.loads(Path(path, manifest.folder(step), manifest.NAME).read_bytes())
    if found.step != step:
        raise CheckpointError(f"the manifest in {manifest.folder(step)} is of step {found.step}")
    return found

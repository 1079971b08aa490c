"""Which steps of a checkpoint are committed on its storage. Needs no torch."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from elastic.checkpoint.storage import LOOKS, Storage, words
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError
from elastic.proto.manifest import Manifest


def committed(storage: Storage, step: int | None = None) -> Manifest | None:
    """The one that was committed last, or that of a step; one that is not sound is passed over.

    Raises OSError where the storage cannot be looked at.
    """
    found, _ = readable(storage, [s for s in _steps(storage) if step in (None, s)])
    return found[0] if found else None


def _steps(storage: Storage) -> list[int]:
    return [step for step, names in storage.listing().items() if manifest.NAME in names]


def readable(storage: Storage, steps: Collection[int]) -> tuple[list[Manifest], list[str]]:
    """The manifests of those steps, the one that was committed last first; and what is wrong with
    those that cannot be read."""
    with ThreadPoolExecutor(LOOKS) as pool:
        looked = list(pool.map(lambda step: _try(storage, step), steps))
    found = [one for one in looked if isinstance(one, Manifest)]
    wrong = [one for one in looked if isinstance(one, str)]
    return sorted(found, key=lambda one: -one.sequence), wrong


def _try(storage: Storage, step: int) -> Manifest | str | None:
    try:
        return read(storage, step)
    except FileNotFoundError:
        return None  # deleted since it was listed
    except (OSError, CheckpointError) as error:
        return f"{where(storage, step, manifest.NAME)}: {words(error)}"


def read(storage: Storage, step: int) -> Manifest:
    """A step's. Raises OSError, `CheckpointError`."""
    file = storage.open(step, manifest.NAME)
    found = manifest.loads(bytes(file.read(0, file.size)))
    if found.step != step:
        raise CheckpointError(f"the manifest in {manifest.folder(step)} is of step {found.step}")
    return found


def where(storage: Storage, step: int, name: str) -> str:
    """A file's name in full."""
    return f"{storage.url}/{manifest.folder(step)}/{name}"


def sound(storage: Storage, step: int) -> Manifest | None:
    """What is committed of a step; None for what is no sound manifest too."""
    try:
        return read(storage, step)
    except (FileNotFoundError, CheckpointError):
        return None


def commit(storage: Storage, told: Manifest) -> None:
    """Make written files a step, the newest, unless that has been done. Raises OSError.

    told: its sequence is found here.
    """
    there = sound(storage, told.step)
    if there is not None and (there.job, there.moment) == (told.job, told.moment):
        return
    last = committed(storage)
    told = replace(told, sequence=1 if last is None else last.sequence + 1)
    over = manifest.NAME in storage.listing().get(told.step, ())
    storage.publish(told.step, manifest.NAME, manifest.dumps(told).encode(), over=over)

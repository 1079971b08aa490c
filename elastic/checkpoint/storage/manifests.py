"""Which steps of a checkpoint are committed on its storage. Needs no torch."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from elastic.checkpoint.storage.protocol import LOOKS, Storage, lasting, words
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


def readable(
    storage: Storage, steps: Collection[int], away: list[str] | None = None
) -> tuple[list[Manifest], list[str]]:
    """The manifests of those steps, the one that was committed last first; and what is wrong with
    those that cannot be read. away: takes what of that may be no fault of theirs."""
    with ThreadPoolExecutor(LOOKS) as pool:
        looked = list(pool.map(lambda step: _try(storage, step, away), steps))
    found = [one for one in looked if isinstance(one, Manifest)]
    wrong = [one for one in looked if isinstance(one, str)]
    return sorted(found, key=lambda one: one.order, reverse=True), wrong


def _try(storage: Storage, step: int, away: list[str] | None) -> Manifest | str | None:
    try:
        return read(storage, step)
    except FileNotFoundError:
        return None  # deleted since it was listed
    except (OSError, CheckpointError) as error:
        why = f"{where(storage, step, manifest.NAME)}: {words(error)}"
        if away is not None and not lasting(error):
            away.append(why)
        return why


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


class Committed(NamedTuple):
    done: bool
    """The files are a step."""
    beside: str = ""
    """Another job that has committed since this one last did: both save here at once."""


def commit(storage: Storage, told: Manifest) -> Committed:
    """Make written files a step, the newest, unless a later moment of the job is one already: whoever was
    slow makes nothing older the newest.

    told: its sequence is found here; its round is 0 where no job keeps it. Raises OSError, also where a
    manifest cannot be looked at: it may have the number that this one would get; or a shard is not there.
    """

    def look(step: int) -> Manifest | None:
        try:
            return sound(storage, step)
        except OSError as error:
            name = where(storage, step, manifest.NAME)
            why = f"{name} may be the newest and cannot be read, so nothing is committed: {words(error)}"
            raise OSError(error.errno, why) from error

    listing = storage.listing()
    with ThreadPoolExecutor(LOOKS) as pool:
        steps = [step for step, names in listing.items() if manifest.NAME in names]
        known = [one for one in pool.map(look, steps) if one is not None]
    same = [one.moment for one in known if one.job == told.job]
    newest = max(known, key=lambda one: one.order, default=told)
    beside = newest.job if same and newest.job != told.job else ""
    if told.moment in same:
        return Committed(True, beside)
    if told.round and max(same, default=told.moment) > told.moment:
        return Committed(False, beside)
    told = replace(told, sequence=1 + max((one.sequence for one in known), default=0))
    names = listing.get(told.step, ())
    _check_all_there(storage, told, names, beside)
    over = manifest.NAME in names
    storage.publish(told.step, manifest.NAME, manifest.dumps(told).encode(), over=over)
    return Committed(True, beside)


def _check_all_there(storage: Storage, told: Manifest, names: Collection[str], beside: str) -> None:
    """Raises OSError where one of its shards is not. names: as its folder was listed, which a network's file system may
    remember from before; beside: another job that deletes here what it does not know."""
    for shard in told.shards:
        if shard.file in names:
            continue
        try:
            storage.open(told.step, shard.file)
        except FileNotFoundError as error:
            cause = (
                f"another job ({beside[:8]}) saves here too, and takes the place of this one's steps: give each a path "
                "of its own"
                if beside
                else "all nodes have to share this storage, and no other job is to save here"
            )
            raise OSError(
                error.errno,
                f"the shard of rank {shard.rank} is not in {where(storage, told.step, shard.file)} for the node that "
                f"is to commit the step: {cause}",
            ) from error

"""What a script gives a `Checkpointer`, checked before anything is begun: the keeper, who would find it,
can only hang up."""

import operator
import os
from collections.abc import Mapping

from elastic.checkpoint.storage.protocol import URL, canonical
from elastic.proto import manifest
from elastic.proto.errors import CheckpointError


def whole(name: str, given: object) -> int:
    """A number that counts something; numpy's are as good. Raises `CheckpointError`, also for one that
    no step can have."""
    try:
        number = None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise CheckpointError(f"{name} is a whole number, not {given!r}")
    if number > manifest.MOST_STEP:
        raise CheckpointError(f"{name} is at most {manifest.MOST_STEP}, not {number}")
    return number


def step(given: object) -> int:
    """One that can be written. Raises `CheckpointError`."""
    number = whole("a step", given)
    if number < 1:
        raise CheckpointError(f"steps are counted from 1, so there is no step {number}")
    return number


def rule(name: str, given: object) -> int | None:
    """A number of 1 or more, or none. Raises `CheckpointError`."""
    if given is None:
        return None
    number = whole(name, given)
    if number < 1:
        raise CheckpointError(f"{name} is 1 or more, not {number}")
    return number


def named(state: object) -> None:
    """Raises `CheckpointError` where a state is no dict."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f'a state is a dict of what is in it, such as {{"model": model}}, not a {type(state).__name__}'
        )


def place(path: str | os.PathLike[str]) -> str:
    """What everybody calls that checkpoint. Raises `CheckpointError` for what names none."""
    text = os.fsdecode(path)
    if not text:  # an unset variable
        raise CheckpointError("the path of a checkpoint is empty")
    found = canonical(text)
    if URL.match(text) and not (URL.match(found) or found.startswith("/")):
        raise CheckpointError(f"{text} names no folder: write one behind it")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the path {found!r} is no UTF-8: choose another") from error
    if "\0" in found:
        raise CheckpointError(f"the path {found!r} has a zero byte: choose another")
    return found

"""Which GPUs CUDA_VISIBLE_DEVICES shows to a process."""

from collections.abc import Sequence


def visible_devices(visible: str | None, uuids: Sequence[str]) -> list[str]:
    """Names of those that CUDA would show, in its order: the index of a GPU; the entry itself for a MIG instance, and
    for a UUID where none is known. visible: the variable; None where it is not set. uuids: of this machine's GPUs in
    NVML's order, empty where they are not known. CUDA's rules: the first entry that names none ends the list, and one
    that is named twice empties it."""
    if visible is None:
        return [str(index) for index in range(len(uuids))]
    names: list[str] = []
    for entry in map(str.strip, visible.split(",") if uuids else ()):
        name = _name(entry, uuids)
        if name is None:
            break
        if name in names:
            return []
        names.append(name)
    return names


def _name(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.startswith("MIG-"):
        return entry
    if not entry.startswith("GPU-"):
        index = _leading_number(entry)
        return str(index) if 0 <= index < len(uuids) else None
    if not all(uuids):
        return entry
    matches = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return str(matches[0]) if len(matches) == 1 else None


def _leading_number(entry: str) -> int:
    """The number that `entry` begins with, as CUDA reads it (`1gpu` is 1), or -1."""
    digits = entry.removeprefix("+")
    width = next((i for i, char in enumerate(digits) if char not in "0123456789"), len(digits))
    return int(digits[:width]) if width else -1

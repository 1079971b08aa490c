"""What there is in the memory of a node, by its slots."""

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from elastic.proto import slot
from elastic.proto.errors import SlotError
from elastic.proto.moment import Moment


def held(pid: int) -> dict[int, set[Moment]]:
    """By rank, the moments of which a process has a snapshot open."""
    found = defaultdict[int, set[Moment]](set)
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError, SlotError):
            if "elastic-slot" in os.readlink(entry):
                stamp = slot.parse(memoryview(entry.read_bytes()[: slot.PAGE])).stamp
                found[stamp.rank].add(Moment(stamp.round, stamp.step))
    return found

"""A state from storage alone: no job, no other rank, for programs that use what was trained."""

import logging
import os
from typing import Any

from elastic.checkpoint.load import files
from elastic.checkpoint.load.restore import Restore
from elastic.checkpoint.state.collect import Place
from elastic.checkpoint.storage import manifests
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import canonical

log = logging.getLogger(__name__)


def load(path: str | os.PathLike[str], state: dict[str, Any], *, step: int | None = None) -> int:
    """Load what `state` names from the step that was committed last, or from `step`; returns it.

    0 where there is none: the state is as it was. What the checkpoint has beside that is not read.
    Raises `CheckpointError` for what it has not, or only damaged.
    """
    storage = connect(canonical(path))
    found = manifests.committed(storage, step)
    if found is None:
        return 0
    sources, wrong = files.sources(storage, found.step)
    restore = Restore([sources[rank] for rank in sorted(sources)], Place())
    restore.apply(state, strict=True)
    for complaint in (*wrong, *restore.damaged):
        log.error("%s", complaint)
    return found.step

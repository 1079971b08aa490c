"""What `@record` promises: the root cause of a failed job in the launcher's own error file."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def hand_on(
    source: Path | None, environ: Mapping[str, str], reason: str, exit_code: int | None
) -> None:
    """Write the file that `environ` names, if it does, from what a rank left in `source`, or from
    `reason` where none did.

    A file that cannot be read or written changes nothing: the job has failed in any case.
    """
    target = environ.get("TORCHELASTIC_ERROR_FILE")
    if not target:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        told: Any = {"message": {"message": reason, "extraInfo": {}}}
        if source is not None:
            told = json.loads(source.read_text())
        if isinstance(told.get("message"), dict) and exit_code is not None:
            told["message"]["errorCode"] = exit_code
        Path(target).write_text(json.dumps(told))

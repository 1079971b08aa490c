"""What `@record` promises: the root cause of a failed job in the launcher's own error file."""

import contextlib
import json
from pathlib import Path
from typing import Any


def copy(source: Path | None, target: Path, reason: str, exit_code: int | None) -> None:
    """Write `target` from what a rank left in `source`, or from `reason` where none did.

    A file that cannot be read or written changes nothing: the job has failed in any case.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        told: Any = {"message": {"message": reason, "extraInfo": {}}}
        if source is not None:
            told = json.loads(source.read_text())
        if isinstance(told.get("message"), dict) and exit_code is not None:
            told["message"]["errorCode"] = exit_code
        target.write_text(json.dumps(told))

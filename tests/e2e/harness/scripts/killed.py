"""An example, whose rank 1 is killed once, in its save of a step: `killed.py MARK STEP SCRIPT ARGUMENTS`.

MARK: a file that is there from then on.
"""

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from elastic import checkpoint

MARK, STEP, SCRIPT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]


class Killed(checkpoint.Checkpointer):
    def save(self, step: int, *args: Any, **kwargs: Any) -> None:
        if step == STEP and os.environ["RANK"] == "1" and not MARK.exists():
            MARK.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().save(step, *args, **kwargs)


checkpoint.Checkpointer = Killed  # type: ignore[misc]
sys.argv[:] = sys.argv[3:]
runpy.run_path(SCRIPT, run_name="__main__")

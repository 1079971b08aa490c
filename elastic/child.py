"""elastic-run as the child of a launching process: `python -m elastic.child PARENT_PID ARGUMENTS`.

Started by `elastic_launch` (elastic/launch.py), which it does not outlive.
"""

import os
import signal
import sys

from elastic import run
from elastic.agent import prctl


def main(argv: list[str]) -> int:
    """Run a job's node to its end; returns the exit code."""
    prctl.set_pdeathsig(signal.SIGTERM)
    return run.main(argv[1:]) if os.getppid() == int(argv[0]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Start DLRover 0.6.1's launcher on a torch newer than it knows; runs in DLRover's own venv.

Its SubprocessHandler call lacks the argument `numa_options` that torch has since required.
"""

import importlib
import sys
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

Handler: Any = subprocess_handler.SubprocessHandler
_init = Handler.__init__


def init(self: Any, *args: Any, **named: Any) -> None:
    """`numa_options`, the last of seven, is optional again."""
    if len(args) < 7:
        named.setdefault("numa_options", None)
    _init(self, *args, **named)


if __name__ == "__main__":
    Handler.__init__ = init
    elastic_run = importlib.import_module("dlrover.trainer.torch.elastic_run")
    sys.exit(elastic_run.main())

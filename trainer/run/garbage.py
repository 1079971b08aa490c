"""Python's garbage, collected by all ranks behind the same steps.

Left to itself each rank stops to collect when it happens to, and all others wait for it.
"""

import atexit
import contextlib
import gc
from collections.abc import Callable, Iterator

EVERY = 50
"""Steps."""


@contextlib.contextmanager
def collected() -> Iterator[Callable[[int], None]]:
    """As long as it lasts, what is yielded collects: called behind each step, with the number of finished ones.

    What is there after the first of them, compiled graphs included, stays to the end and is not looked at again.
    Nor is anything when the process ends: among all that torch has made, that takes each rank a second or two.
    """
    first = True

    def collect(step: int) -> None:
        nonlocal first
        if first or step % EVERY == 0:
            gc.collect()
        if first:
            gc.freeze()
        first = False

    gc.disable()
    atexit.register(gc.freeze)
    try:
        yield collect
    finally:
        gc.unfreeze()
        gc.enable()

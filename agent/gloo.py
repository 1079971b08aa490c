"""Inside the user's process: Gloo's threads at its end.

A thread of Gloo's that lets go of a tensor needs the GIL for it. If it still waits for that when the
interpreter ends, Python ends the thread in C++ code that does not allow it, and a script that is done dies
of SIGABRT ("terminate called without an active exception"; pytorch issue 190489). So we let them have it.
"""

import os
import time

from elastic.agent import tasks

WAIT = 1.0
"""Seconds at most."""
LOOK = 0.005
"""Seconds between two looks; the GIL is free meanwhile."""
NAME = "pt_gloo_runloop"
"""Of the threads that run collectives."""


def let_finish(pid: int, wait: float = WAIT) -> None:
    """At the end of process `pid` (a fork of it does nothing): until no thread of Gloo's runs, in two looks."""
    if os.getpid() != pid:
        return
    end = time.monotonic() + wait
    still = 0
    while still < 2 and time.monotonic() < end:
        states = [thread.state for thread in tasks.threads(pid).values() if thread.name == NAME]
        if not states:
            return
        still = 0 if "R" in states else still + 1
        time.sleep(LOOK)  # noqa: TID251 - no event tells what Gloo's threads do

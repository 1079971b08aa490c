"""Inside the user's process: Gloo's threads at its end.

A thread of Gloo's that lets go of a tensor needs the GIL for it. If it still waits for that when the
interpreter ends, Python ends the thread in C++ code that does not allow it, and a script that is done dies
of SIGABRT ("terminate called without an active exception"; pytorch issue 190489). So we let them have it.
"""

import os
import time
from collections.abc import Iterator

WAIT = 1.0
"""Seconds at most."""
LOOK = 0.005
"""Seconds between two looks; the GIL is free meanwhile."""
NAME = b"(pt_gloo_runloop"


def let_finish(pid: int) -> None:
    """At the end of process `pid` (a fork of it does nothing): until no thread of Gloo's runs, in two looks."""
    if os.getpid() != pid:
        return
    end = time.monotonic() + WAIT
    still = 0
    while still < 2 and time.monotonic() < end:
        states = list(_states())
        if not states:
            return
        still = 0 if b"R" in states else still + 1
        time.sleep(LOOK)  # noqa: TID251 - no event tells what Gloo's threads do


def _states() -> Iterator[bytes]:
    """Of each thread of Gloo's that runs collectives, as in proc(5)."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat", "rb") as file:
                stat = file.read()
        except OSError:  # it has ended
            continue
        if NAME in stat:
            yield stat[stat.rindex(b")") + 2 :][:1]

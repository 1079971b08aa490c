"""What torch's DataLoader says of workers that a signal ended: it raises in the rank, which the signal did not meet."""

import re

_SAID = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?:is killed by signal: Killed|exited unexpectedly)"
)


def lost_workers(message: str) -> frozenset[int]:
    """Pids of those that a SIGKILL may have ended, by an exception's message."""
    found = _SAID.search(message)
    return frozenset(map(int, re.findall(r"\d+", found["pids"]))) if found else frozenset()

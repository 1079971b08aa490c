"""The two settings of a Linux process that Python does not offer."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# Loaded once, before any fork: a rank that is on its way must not have to look for libraries.
_libc = ctypes.CDLL(None, use_errno=True)


def set_child_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_pdeathsig(number: int = signal.SIGKILL) -> None:
    """Be sent signal `number` when the thread of our parent that started us ends. Raises OSError.

    A parent that ended before this call is not noticed: look at `os.getppid()` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")

"""A command in a sandbox where no process's memory may be read, as in many containers: Linux on x86-64.

python -m tests.e2e.harness.sandbox COMMAND ARGUMENT...
"""

import ctypes
import os
import struct
import sys

REFUSED = (2, 101, 310)
"""Calls by their numbers: open, by which py-spy's C library goes for /proc/<pid>/mem, and no other's; ptrace;
process_vm_readv."""
LOAD, JUMP_IF, ANSWER = 0x20, 0x15, 0x06
REFUSE, ALLOW = 0x00050000 | 1, 0x7FFF0000
NO_NEW_PRIVS, SECCOMP, BY_FILTER = 38, 22, 2


def enter() -> None:
    """For good, and for all that this process starts."""
    program = [(LOAD, 0, 0, 0)]
    for number in REFUSED:
        program += [(JUMP_IF, 0, 1, number), (ANSWER, 0, 0, REFUSE)]
    program.append((ANSWER, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    rules = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SECCOMP, BY_FILTER, rules):
        raise OSError(ctypes.get_errno(), "no sandbox")


if __name__ == "__main__":
    enter()
    os.execvp(sys.argv[1], sys.argv[1:])

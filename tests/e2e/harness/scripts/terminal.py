"""Runs a command in front on a terminal with `stty tostop`; passes on what it writes, and its end."""

import contextlib
import os
import pty
import sys
import termios

pid, terminal = pty.fork()
if pid == 0:
    attributes = termios.tcgetattr(0)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(0, termios.TCSANOW, attributes)
    os.execvp(sys.argv[1], sys.argv[1:])
with contextlib.suppress(OSError):  # EIO, once nobody has it open
    while data := os.read(terminal, 4096):
        os.write(2, data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

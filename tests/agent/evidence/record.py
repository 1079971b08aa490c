"""Makes dumps/python-<version>.txt: run it by each Python, with its standard output there."""

import faulthandler
import fcntl
import os
import signal
import sys
import sysconfig
import threading
from typing import Any

CODE = """
def worker():
    wait.wait()
def deep(n):
    if n:
        deep(n - 1)
    else:
        wait.wait()
def ask():
    os.kill(os.getpid(), signal.SIGRTMAX - 9)
    sum(range(10))
class Trainer:
    def step(self):
        ask()
"""


def main() -> None:
    fd = os.memfd_create("dump")
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(signal.SIGRTMAX - 9, file=fd, all_threads=True, chain=False)
    wait = threading.Event()
    names: dict[str, Any] = {"wait": wait, "os": os, "signal": signal}
    code = compile(CODE, "/home/anna/träin/loop.py", "exec")
    exec(code, names)  # noqa: S102 - our own text, under a file name of our choice
    for name, args in (("worker", ()), ("deep", (150,))):
        threading.Thread(target=names[name], args=args, daemon=True).start()
    frames = sys._current_frames
    while sum(frame.f_code.co_name == "wait" for frame in frames().values()) < 2:
        wait.wait(0.01)
    names["Trainer"]().step()
    text = os.pread(fd, 1 << 20, 0).decode()
    sys.stdout.write(text.replace(sysconfig.get_path("stdlib"), "/usr/lib/python"))


if __name__ == "__main__":
    main()

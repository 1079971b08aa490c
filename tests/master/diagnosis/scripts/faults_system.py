"""What ends a process from below, and what is taken from it: signals, memory."""

import argparse
import ctypes
import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import threading
from typing import Any

Args = argparse.Namespace


def _native() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _run(code: bytes) -> None:
    """Machine code of our own, as a kernel that was built badly."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    ctypes.CFUNCTYPE(None)(address)()


def segfault(args: Args) -> None:
    if args.variant == 1:
        faulthandler.enable()
    if args.variant == 2:
        ctypes.memset(0x1234, 0, 64)
    ctypes.string_at(0)


def segfault_in_thread(args: Args) -> None:
    faulthandler.enable()
    thread = threading.Thread(target=ctypes.string_at, args=(8,))
    thread.start()
    thread.join()


def deep_stack(args: Args) -> None:
    sys.setrecursionlimit(1 << 30)
    nested: Any = []
    for _ in range(1 << 21):
        nested = [nested]
    repr(nested)


def stack_overflow(args: Args) -> None:
    sys.setrecursionlimit(1 << 30)

    class Node:
        def __getattr__(self, name: str) -> Any:
            return getattr(self, name)

    _ = Node().child


def aborts(args: Args) -> None:
    if args.variant == 1:
        faulthandler.enable()
    os.abort()


def bad_free(args: Args) -> None:
    libc = _native()
    if args.variant:
        libc.malloc.restype = ctypes.c_void_p
        block = libc.malloc(5000)
        libc.malloc(64)
        libc.free(ctypes.c_void_p(block))
        libc.free(ctypes.c_void_p(block))
    libc.free(ctypes.c_void_p(0x7F0000001230))


def heap_overrun(args: Args) -> None:
    libc = _native()
    libc.malloc.restype = ctypes.c_void_p
    blocks = [libc.malloc(2000) for _ in range(4)]
    ctypes.memset(blocks[0], 0x41, 4000)
    for block in blocks:
        libc.free(ctypes.c_void_p(block))
    for _ in range(64):
        libc.malloc(4000)


def terminate(args: Args) -> None:
    """An exception in C++ that nobody catches."""
    native: Any = ctypes.CDLL(os.path.abspath("libthrow.so"))
    native.throw_in_thread()


def divides(args: Args) -> None:
    _native().div(1, 0)


def illegal_instruction(args: Args) -> None:
    _run(b"\x0f\x0b")


def trap(args: Args) -> None:
    _run(b"\xcc\xc3")


def cut_mapping(args: Args) -> None:
    """The file under a mapping got shorter."""
    if args.variant:
        faulthandler.enable()
    with open("train.bin", "w+b") as file:
        file.truncate(1 << 16)
        mapped = mmap.mmap(file.fileno(), 1 << 16)
        file.truncate(0)
        print(mapped[4096])


def fatal_python(args: Args) -> None:
    ctypes.pythonapi.Py_FatalError(b"the interpreter's state is damaged")


def eats_memory(args: Args) -> None:
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20) * 16))


def child_eats_memory(args: Args) -> None:
    """A child is the OOM killer's victim, and the script reports it."""
    code = "held = []\nwhile True: held.append(b'x' * (1 << 24))"
    subprocess.run([sys.executable, "-c", code], check=True)


def signals_itself(args: Args) -> None:
    os.kill(os.getpid(), [signal.SIGUSR1, signal.SIGPIPE, signal.SIGHUP][args.variant])


def sigpipe_default(args: Args) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    reader, writer = os.pipe()
    os.close(reader)
    os.write(writer, b"x")

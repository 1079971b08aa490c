"""Inside the user's process: whether its GPU goes on, asked by a thread that may wait for it while nobody else does.

A queue that is full lets no call in before the device has done something, and torch's calls keep the GIL meanwhile: who
asked by them would stop the whole process, its other answers too. The driver's own, by ctypes, let it go.
"""

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastic.proto.looks import OnDevice

PATIENCE = 0.05
"""Seconds for an answer; it takes some microseconds where the queue has room."""
NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
NO_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""


class Driver:
    """What is asked of CUDA's driver, in the thread that made it. Raises OSError."""

    def __init__(self, device: int) -> None:
        """device: as CUDA numbers what this process sees."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._event = ctypes.c_void_p()
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._ask("cuDeviceGet", ctypes.byref(number), device)
        # torch's context, which is there.
        self._ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._ask("cuCtxSetCurrent", context)
        self._ask("cuEventCreate", ctypes.byref(self._event), NO_TIMING)

    def mark(self, stream: int) -> None:
        """Behind all that a stream, by its handle, has been given; waits where the queue is full."""
        self._ask("cuEventRecord", self._event, ctypes.c_void_p(stream))

    def is_past_mark(self) -> bool:
        return self._ask("cuEventQuery", self._event)

    def is_idle(self, stream: int) -> bool:
        return self._ask("cuStreamQuery", ctypes.c_void_p(stream))

    def _ask(self, name: str, *args: object) -> bool:
        """False: not yet."""
        code: int = getattr(self._cuda, name)(*args)
        if code not in (0, NOT_READY):
            raise OSError(f"{name}: CUDA error {code}")
        return code == 0


class Asker:
    """Of one device."""

    def __init__(
        self, driver: Callable[[], Driver], quiet: Callable[[], AbstractContextManager[bool]]
    ) -> None:
        """driver: makes it, in the thread that asks; quiet: in it nothing must be asked where it is True."""
        self._make, self._quiet = driver, quiet
        self._wanted, self._answered = threading.Event(), threading.Event()
        self._stream = 0
        """That is asked about."""
        self._answer: OnDevice | None = None
        """None: it cannot be known."""
        self._waiting = False
        """The question before is not answered yet."""
        self._marked = False
        threading.Thread(target=self._run, name="elastic-device", daemon=True).start()

    def ask(self, stream: int) -> "OnDevice":
        """From one thread, again and again. stream: its handle."""
        from elastic.proto.looks import OnDevice

        if self._waiting:
            self._waiting = not self._answered.is_set()
            # What the device had then has no room behind it yet; or it has got some, and goes on.
            return OnDevice.HELD if self._waiting else OnDevice.BUSY
        self._stream = stream
        self._answered.clear()
        self._wanted.set()
        if not self._answered.wait(PATIENCE):
            self._waiting = True
            return OnDevice.BUSY
        return self._answer or OnDevice.UNKNOWN

    def _run(self) -> None:
        driver: Driver | None = None
        while True:
            self._wanted.wait()
            self._wanted.clear()
            self._answer = None
            try:
                with self._quiet() as leave:
                    if not leave:
                        driver = driver or self._make()
                        self._answer = self._look(driver)
            except OSError:
                self._marked = False
            self._answered.set()

    def _look(self, driver: Driver) -> "OnDevice":
        from elastic.proto.looks import OnDevice

        if self._marked and not driver.is_past_mark():
            return OnDevice.HELD
        self._marked = False
        if driver.is_idle(self._stream):
            return OnDevice.IDLE
        driver.mark(self._stream)
        self._marked = True
        return OnDevice.BUSY

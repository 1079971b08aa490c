"""Xids as the driver's library tells of them, for where the kernel's log may not be read: from a thread, since a driver
that ails may keep whoever asks it."""

import contextlib
import threading
import time
from collections import deque
from typing import Any

PATIENCE_MS = 1000
"""That the library is asked to wait; how late a closed one notices that it is."""


class Xids:
    """From now on, of all GPUs that we may see."""

    def __init__(self) -> None:
        self._heard = deque[tuple[float, str]](maxlen=64)
        self._over = threading.Event()
        threading.Thread(target=self._listen, name="elastic-xids", daemon=True).start()

    def lines(self, since: float) -> list[str]:
        """As the kernel's log has them, oldest first; since: on the monotonic clock."""
        return [line for at, line in [*self._heard] if at >= since]

    def close(self) -> None:
        self._over.set()

    def _listen(self) -> None:
        with contextlib.suppress(Exception):  # there is no GPU, or nothing to be had of its driver
            import pynvml

            pynvml.nvmlInit()
            try:
                events = pynvml.nvmlEventSetCreate()
                try:
                    self._wait(pynvml, events)
                finally:
                    pynvml.nvmlEventSetFree(events)
            finally:
                pynvml.nvmlShutdown()  # once for each round's

    def _wait(self, nvml: Any, events: Any) -> None:
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
        while not self._over.is_set():
            with contextlib.suppress(nvml.NVMLError_Timeout):
                found = nvml.nvmlEventSetWait_v2(events, PATIENCE_MS)
                at = nvml.nvmlDeviceGetPciInfo(found.device)
                where = f"PCI:{at.domain:04x}:{at.bus:02x}:{at.device:02x}"
                self._heard.append(
                    (time.monotonic(), f"NVRM: Xid ({where}): {int(found.eventData)}, by NVML")
                )

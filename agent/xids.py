"""Xids as the driver's library tells of them, for where the kernel's log may not be read: from a thread, since a driver
that ails may keep whoever asks it."""

import contextlib
import threading
import time
from collections import deque
from typing import Any

from elastic.proto import xids

PATIENCE_MS = 1000
"""That the library is asked to wait; how late a closed one notices that it is."""

LOST = 79
"""The Xid of a GPU that has fallen off the bus."""


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
        places = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, events)
                places[index] = device, _place(nvml, device)
        while not self._over.is_set():
            try:
                found = nvml.nvmlEventSetWait_v2(events, PATIENCE_MS)
                self._note(_place(nvml, found.device), int(found.eventData))
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError:
                # As where a GPU has fallen off the bus, which ends each wait from then on.
                lost = [index for index, (device, _) in places.items() if _lost(nvml, device)]
                for index in lost:
                    self._note(places.pop(index)[1], LOST)
                self._over.wait(PATIENCE_MS / 1e3)

    def _note(self, where: str, xid: int) -> None:
        self._heard.append((time.monotonic(), xids.record(where, xid)))


def _place(nvml: Any, device: Any) -> str:
    at = nvml.nvmlDeviceGetPciInfo(device)
    return f"{at.domain:04x}:{at.bus:02x}:{at.device:02x}"


def _lost(nvml: Any, device: Any) -> bool:
    try:
        nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
    except nvml.NVMLError_GpuIsLost:
        return True
    except nvml.NVMLError:
        return False
    return False

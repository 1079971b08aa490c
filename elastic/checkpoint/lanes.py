"""Ways for bytes to host memory beside training's own: a stream of a device, or none where all is on the
host already. Bytes are contiguous tensors of uint8."""

import logging
from collections.abc import Sequence
from threading import Event, Lock
from typing import Any, Protocol

import torch

from elastic.checkpoint import host
from elastic.proto.errors import CheckpointError

log = logging.getLogger(__name__)

RESERVE = 1 << 30
"""Bytes of a device's memory that a shadow leaves free, at least; a twentieth where that is more."""

PAUSE = 0.002
"""Seconds between two parts: while CUDA registers one (0.7 ms), training's kernels cannot start."""
_PORTABLE = 1
"""cudaHostRegisterPortable: known to all contexts."""


class Lane(Protocol):
    """A mark is a place in an order of work; None is one that is passed already."""

    def now(self) -> Any:
        """A mark at what training has begun so far."""

    def follow(self, mark: Any) -> None:
        """What is copied from here on waits for it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy."""

    def mark(self) -> Any:
        """A mark at what was begun with `copy`."""

    def hold(self, mark: Any) -> None:
        """What training begins from here on waits for it."""

    def finish(self, mark: Any) -> None:
        """Wait for it."""

    def register(self, data: memoryview) -> None:
        """Have the device know this memory, so that it copies at full speed, and without us."""

    def close(self) -> None:
        """Wait for all, and have the device forget the memory."""


class Host:
    """Tensors in host memory: what is begun is done."""

    def now(self) -> None: ...

    def follow(self, mark: None) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host.copy(target, source)

    def mark(self) -> None: ...

    def hold(self, mark: None) -> None: ...

    def finish(self, mark: None) -> None: ...

    def register(self, data: memoryview) -> None: ...

    def close(self) -> None: ...


class Cuda:
    """A stream beside training's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._registering = Lock()
        self._over = Event()
        self._registered: list[int] = []
        self._refused = False

    def now(self) -> torch.cuda.Event:
        return self._event(torch.cuda.current_stream(self._device))

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.is_cpu:
            host.copy(target, source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        return self._event(self._stream)

    def hold(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def register(self, data: memoryview) -> None:
        address = host.address_of(data)
        with self._registering, torch.cuda.device(self._device):
            error = int(self._cudart.cudaHostRegister(address, len(data), _PORTABLE))
            self._over.wait(PAUSE)
        if not error:
            self._registered.append(address)
        elif not self._refused:
            self._refused = True
            log.warning(
                "CUDA does not register the memory of snapshots (error %d): copies are slow", error
            )

    def close(self) -> None:
        self._over.set()
        self._stream.synchronize()
        while self._registered:
            self._cudart.cudaHostUnregister(self._registered.pop())
        self._over.clear()

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device that they are on, but for what is in host memory. Raises `CheckpointError` for several."""
    found = {tensor.device for tensor in tensors if not tensor.is_cpu}
    if len(found) > 1 or any(device.type != "cuda" for device in found):
        names = ", ".join(sorted(map(str, found)))
        raise CheckpointError(
            f"a rank's tensors are on {names}: a checkpoint takes one CUDA device"
        )
    return found.pop() if found else torch.device("cpu")


def room(device: torch.device) -> int:
    """Bytes that a shadow may take, as far as what training has needed by now tells."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    spare = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return free + spare - max(RESERVE, total // 20)

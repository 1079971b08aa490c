"""Ways for bytes to host memory beside training's own: a stream of a device, or none where all is on the
host already. Bytes are contiguous tensors of uint8."""

import logging
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from threading import Event, Lock
from time import monotonic
from typing import Any, Protocol

import torch

from elastic.checkpoint.memory import host
from elastic.proto.errors import CheckpointError

log = logging.getLogger(__name__)

RESERVE = 1 << 30
"""Bytes of a device's memory that a shadow leaves free, at least; a twentieth where that is more."""

PAUSE = 3.0
"""Times as long as CUDA takes to register a part, until the next: meanwhile training's kernels cannot
start. 0.7 ms for 16 MiB of small pages, less for huge ones."""
Rest = Callable[[float], object]
"""Waits that many seconds, or less where there is something better to do."""

_PORTABLE = 1
"""cudaHostRegisterPortable: known to all contexts."""


_registered: list[tuple[int, int]] = []
"""Address and end of each part of this process's memory that was registered, in order."""
_table = Lock()
_registering = Lock()


class Lane(Protocol):
    """A mark is a place in an order of work; None is one that is passed already."""

    def enter(self) -> None:
        """What a thread of ours does first. A new one is on device 0, and whatever it asks of CUDA would
        take a context there: half a gigabyte, and seconds."""

    def now(self) -> Any:
        """A mark at what training has begun so far."""

    def follow(self, mark: Any) -> None:
        """What is copied from here on waits for it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy, in a thread that has entered."""

    def mark(self) -> Any:
        """A mark at what was begun with `copy`."""

    def hold(self, mark: Any) -> None:
        """What training begins from here on waits for it."""

    def finish(self, mark: Any) -> None:
        """Wait for it."""

    def register(self, data: memoryview, rest: Rest | None = None) -> None:
        """Have the device know this memory, so that it copies at full speed, and without us. What was
        registered by any lane of this process is known. rest: is called in the place of the pause that follows."""

    def forget(self, data: memoryview) -> None:
        """Have the device forget what was registered of this memory, before it is given back."""

    def close(self) -> None:
        """Wait for all, and be quick with what is being registered."""


class Host:
    """Tensors in host memory: what is begun is done, and there is no device to tell of memory."""

    def enter(self) -> None: ...

    def now(self) -> None: ...

    def follow(self, mark: None) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host.copy(target, source)

    def mark(self) -> None: ...

    def hold(self, mark: None) -> None: ...

    def finish(self, mark: None) -> None: ...

    def register(self, data: memoryview, rest: Rest | None = None) -> None:
        if registered(data) is None:
            _note(data)

    def forget(self, data: memoryview) -> None:
        _forget(data)

    def close(self) -> None: ...


class Cuda:
    """A stream beside training's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._over = Event()
        self._refused = False

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def now(self) -> torch.cuda.Event:
        return self._event(torch.cuda.current_stream(self._device))

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.is_cpu:
            host.copy(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        return self._event(self._stream)

    def hold(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self, mark: torch.cuda.Event | None) -> None:
        if mark is not None:
            mark.synchronize()

    def register(self, data: memoryview, rest: Rest | None = None) -> None:
        with _registering, torch.cuda.device(self._device):
            if registered(data) is not None:
                return
            begin = monotonic()
            address = host.address_of(data)
            error = int(self._cudart.cudaHostRegister(address, len(data), _PORTABLE))
            (rest or self._over.wait)(PAUSE * (monotonic() - begin))
        if not error:
            _note(data)
        elif not self._refused:
            self._refused = True
            log.warning(
                "CUDA does not register the memory of snapshots (error %d): copies are slow", error
            )

    def forget(self, data: memoryview) -> None:
        with torch.cuda.device(self._device):
            for address in _forget(data):
                self._cudart.cudaHostUnregister(address)

    def close(self) -> None:
        self._over.set()
        self._stream.synchronize()
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


def registered(data: memoryview) -> list[memoryview] | None:
    """The same bytes, cut where what was registered at once ends, since no copy may go beyond; None
    where not all of them were."""
    if data.readonly:
        return None
    address, at, found = host.address_of(data), 0, []
    with _table:
        number = bisect_right(_registered, address, key=lambda part: part[0]) - 1
        while at < len(data):
            start, end = _registered[number] if 0 <= number < len(_registered) else (0, 0)
            if not start <= address + at < end:
                return None
            found.append(data[at : end - address])
            at, number = end - address, number + 1
    return found


def _note(data: memoryview) -> None:
    with _table:
        insort(_registered, (host.address_of(data), host.address_of(data) + len(data)))


def _forget(data: memoryview) -> list[int]:
    """The addresses of what was registered there."""
    first = host.address_of(data)
    with _table:
        found = [start for start, _ in _registered if first <= start < first + len(data)]
        _registered[:] = [part for part in _registered if not first <= part[0] < first + len(data)]
    return found

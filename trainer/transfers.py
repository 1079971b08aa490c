"""Numbers between host and device without a wait for what the device has to do before."""

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """What the host has made, there as soon as the device comes to it."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


class ToHost:
    """A number of the device's, as it is now, that the host reads once it has given the device more to do."""

    def __init__(self, number: Tensor) -> None:
        self._number = number.to("cpu", non_blocking=True)
        self._there = torch.cuda.current_stream().record_event() if number.is_cuda else None

    @property
    def there(self) -> bool:
        """Whether `read` does not wait."""
        return self._there is None or self._there.query()

    def read(self) -> Tensor:
        """Waits for what the device had to do before it, and for nothing behind it."""
        if self._there is not None:
            self._there.synchronize()
        return self._number

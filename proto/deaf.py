"""The last moments of a process whose loop handled signals."""

import asyncio
import signal
from collections.abc import Iterable


def deafen(numbers: Iterable[int]) -> None:
    """Signals change nothing from now on: the process ends as it is about to. While asyncio closes a
    loop they would be written to a closed pipe, which Python complains of, and then strike."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)

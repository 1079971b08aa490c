"""How often the API server is asked: so many calls a second, and so many at once after a quiet time."""

import asyncio


class Pace:
    """A bucket of tokens; who finds none waits for his, in the order of asking."""

    def __init__(self, qps: float = 20.0, burst: int = 40) -> None:
        self._interval = 1.0 / qps
        self._depth = burst * self._interval
        self._next = float("-inf")

    async def turn(self) -> None:
        """Come back when one more call may be made."""
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now - self._depth) + self._interval
        if self._next > now:
            await asyncio.sleep(self._next - now)

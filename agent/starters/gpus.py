"""What NVML says of a node's GPUs, asked in a thread: a sick driver must not stop the agent."""

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic.agent.visible_devices import visible_devices

DEADLINE = 2.0
"""Seconds for one question."""
MOST_FAILURES = 3
"""Questions in a row that a driver may leave without an answer, before it is not asked again."""


class Gpus:
    """Memory of devices, by their index among those that the job may see."""

    def __init__(self, visible: str | None) -> None:
        self._visible = visible
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        self._handles: list[Any] | None = None
        self._failures = 0

    @property
    def works(self) -> bool:
        """False once there is no NVML, or it did not answer in time, again and again."""
        return self._failures < MOST_FAILURES

    async def used_by(self, pids: Collection[int]) -> dict[int, tuple[int, int]]:
        """Device index and bytes of each of `pids` that holds memory on one."""
        return await self._ask(self._used_by, frozenset(pids)) or {}

    async def free(self) -> list[int]:
        """Free bytes of each device; empty where nobody can say."""
        return await self._ask(self._free) or []

    async def _ask(self, question: Any, *args: Any) -> Any:
        if not self.works:
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DEADLINE):
                answer = await loop.run_in_executor(self._executor, question, *args)
        except Exception:  # noqa: BLE001 - whatever NVML does, ranks go on without it
            self._failures += 1
            return None
        self._failures = 0
        return answer

    def _devices(self) -> list[Any]:
        import pynvml

        if self._handles is None:
            pynvml.nvmlInit()
            every = [
                pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
            ]
            names = visible_devices(self._visible, [pynvml.nvmlDeviceGetUUID(gpu) for gpu in every])
            self._handles = [every[int(name)] for name in names if name.isdecimal()]
        return self._handles

    def _used_by(self, pids: frozenset[int]) -> dict[int, tuple[int, int]]:
        import pynvml

        found: dict[int, tuple[int, int]] = {}
        for index, handle in enumerate(self._devices()):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids and process.usedGpuMemory is not None:
                    found[process.pid] = (index, int(process.usedGpuMemory))
        return found

    def _free(self) -> list[int]:
        import pynvml

        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in self._devices()]

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

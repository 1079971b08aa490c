"""Collectives among the devices of one node: NCCL between GPUs, Gloo between CPU processes."""

import statistics
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic.agent.probes.bandwidth import changed
from elastic.agent.probes.matmul import timed
from elastic.agent.probes.program import Clock, Fault

COUNT = {("cuda", "quick"): 64 << 20, ("cuda", "full"): 256 << 20,
         ("cpu", "quick"): 1 << 20, ("cpu", "full"): 16 << 20}  # fmt: skip
"""Elements (int32) of each rank's part of an all-gather, times the world; of an all-reduce."""
REPETITIONS = {"quick": 5, "full": 20}
TIMEOUT = timedelta(minutes=10)
"""Longer than any deadline of a probe, which is what ends it."""


class Group:
    """The ranks of one node. They meet in the background, since that takes longer than all else."""

    def __init__(
        self, device: torch.device, *, rank: int, world: int, port: int, listen: int | None
    ) -> None:
        """listen: the descriptor of the socket at that port of 127.0.0.1, where we are to serve it."""
        self._device = device
        self._rank, self._world, self._port, self._listen = rank, world, port, listen
        self._error: Exception | None = None
        self._met = (0.0, 0.0)
        """When the meeting began and was over."""
        self._meeting = threading.Thread(target=self._meet, daemon=True, name="meeting")
        self._meeting.start()

    def _meet(self) -> None:
        began = time.monotonic()
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1",
                self._port,
                is_master=self._listen is not None,
                timeout=TIMEOUT,
                wait_for_workers=False,
                multi_tenant=False,
                master_listen_fd=self._listen,
            )
            if cuda := self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread's own
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                store=store,
                rank=self._rank,
                world_size=self._world,
                timeout=TIMEOUT,
                device_id=self._device if cuda else None,
            )
            self._met = (began, time.monotonic())
        except Exception as error:  # noqa: BLE001 - said by the probe that needs it
            self._error = error

    def measure(self, level: str, clock: Clock) -> dict[str, float]:
        """All-reduce and all-gather, each checked; raises Fault. Bus bandwidth as nccl-tests has it.

        clock: is told of the meeting too, which began before.
        """
        self._meeting.join()
        if self._error is not None:
            raise self._error
        clock.note("init", self._met)
        count = COUNT[self._device.type, level]
        with clock.part("all_reduce"):
            reduced, of_sum = self._all_reduce(count, level)
        with clock.part("all_gather"):
            gathered, of_parts = self._all_gather(count // self._world, level)
        if wrong := of_sum or of_parts:  # now: else the others would wait for us in the second
            raise Fault(wrong)
        share = (self._world - 1) / self._world
        return {
            "all_reduce_gb_s": 4 * count / 1e9 / reduced * 2 * share,
            "all_gather_gb_s": 4 * (count // self._world) * self._world / 1e9 / gathered * share,
        }

    def _all_reduce(self, count: int, level: str) -> tuple[float, str]:
        """Seconds, and what is wrong with what came of it."""
        index = torch.arange(count, dtype=torch.int32, device=self._device) % 65536
        mine = torch.empty_like(index)
        seconds = []
        for _ in range(REPETITIONS[level]):
            torch.mul(index, self._rank + 1, out=mine)
            seconds.append(timed(lambda: dist.all_reduce(mine), self._device))
        what = changed(mine, index * (self._world * (self._world + 1) // 2))
        wrong = f"of an all-reduce {what.replace('was written', 'the sum is')}" if what else ""
        return statistics.median(seconds), wrong

    def _all_gather(self, count: int, level: str) -> tuple[float, str]:
        """The same."""
        index = torch.arange(count, dtype=torch.int32, device=self._device)
        mine = index + self._rank
        every = torch.zeros(count * self._world, dtype=torch.int32, device=self._device)
        seconds = [
            timed(lambda: dist.all_gather_into_tensor(every, mine), self._device)
            for _ in range(REPETITIONS[level])
        ]
        wrong = (
            f"of what an all-gather brought from rank {rank} {what}"
            for rank, part in enumerate(every.chunk(self._world))
            if (what := changed(part, index + rank))
        )
        return statistics.median(seconds), next(wrong, "")

"""What it costs to measure steps on a GPU, in pairs of blocks with and without: by DDP of a rank, with nothing else.

Two sizes: steps of some 20 ms, which their device determines, and the smallest, which their host does.
"""

import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from elastic.agent import device_times, hook
from elastic.proto import page

PAIRS, SECONDS = 20, 0.4
"""Of a block."""

torch.cuda.set_device(0)
store = os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
writer = page.PageWriter.claim(page.create(), os.getpid())
assert writer is not None
ticker = hook._Ticker(hook.Attachment(writer, None))
ticker._first = False
sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(ticker.tick)
times = ticker._device = device_times.follow(writer, lambda: ticker._leader)
assert times is not None


def measure(width: int, layers: int, rows: int) -> None:
    factors = [torch.nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*factors).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    ticker._leader = id(optimizer)

    def block(measured: bool) -> float:
        """Seconds of a step, with a wait for the device in each, as of a loss that is looked at."""
        assert times is not None
        times._off = not measured
        if times._open is not None:  # of the block before: its marks would go on without an end
            times._free.append(times._open)
            times._open = None
        began, steps = time.perf_counter(), 0
        while time.perf_counter() < began + SECONDS:
            optimizer.zero_grad()
            model(batch).float().square().mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            steps += 1
        return (time.perf_counter() - began) / steps

    block(True)
    before, ratios, plain = writer.words[page.DEVICE_STEPS], [], []  # type: ignore[union-attr]
    for pair in range(PAIRS):
        found = {measured: block(measured) for measured in ((True, False), (False, True))[pair % 2]}
        ratios.append(found[True] / found[False] - 1)
        plain.append(found[False])
    told = writer.words[page.DEVICE_STEPS] - before  # type: ignore[union-attr]
    error = statistics.stdev(ratios) / PAIRS**0.5
    sys.stdout.write(
        f"cost: steps of {1000 * statistics.median(plain):.2f} ms, {told / PAIRS / SECONDS:.0f} a second measured: "
        f"{statistics.mean(ratios):+.3%} +- {error:.3%}, median {statistics.median(ratios):+.3%}\n"
    )


measure(4096, 8, 8192)
measure(64, 2, 8)
dist.destroy_process_group()

"""A stand-in for CUDA, beside which `device_times.py` runs where there is no GPU: its clock is a number, and a host is
never ahead of it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

STAND_IN = """
import ctypes, json, os, sys, threading
import torch, torch.distributed as dist
from types import SimpleNamespace
from elastic.agent import device_times, hook
from elastic.proto import page

class Refused(Exception):
    "What CUDA raises in a fork, and where a capture does not let it."

class Device:
    now = 0
    capturing = False
    pid = os.getpid()
    recorded = 0
    given, done = 0, float("inf")  # kernels
    marked = 0  # so many had been given then
    room = threading.Event()  # in its queue
    room.set()

    def used(self):
        if self.capturing or os.getpid() != self.pid:
            raise Refused

device = Device()

class Event:
    def __init__(self, enable_timing=False):
        device.used()

    def record(self, stream):
        device.used()
        device.recorded += 1
        self.at = device.now

    def query(self):
        device.used()
        return True

    def elapsed_time(self, later):
        return (later.at - self.at) / 1e6

class Stream:
    cuda_stream = 0
    device_index = 0

    def wait_event(self, event):
        device.now += event

class Library:
    "libcuda."

    def cuDeviceGet(self, *_):
        return 0

    cuDevicePrimaryCtxRetain = cuCtxSetCurrent = cuEventCreate = cuDeviceGet

    def cuEventRecord(self, event, stream):
        device.room.wait()
        device.used()
        device.marked = device.given
        return 0

    def cuEventQuery(self, event):
        device.used()
        return 0 if device.marked <= device.done else 600

    def cuStreamQuery(self, stream):
        device.used()
        return 0 if device.given <= device.done else 600

class CUDAGraph:
    def capture_begin(self):
        device.capturing = True

    def capture_end(self):
        device.capturing = False

stream = Stream()
sys.modules["torch.cuda"] = SimpleNamespace(
    Event=Event, Stream=Stream, CUDAGraph=CUDAGraph, current_stream=lambda: stream, is_initialized=lambda: True,
    is_current_stream_capturing=lambda: device.capturing,
)
ctypes.CDLL = lambda name: Library()
device_times.EVERY_NS = device_times.A_MARK_NS = 0
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
fd = page.create()
seen = page.open_page(fd)
writer = page.PageWriter.claim(fd, os.getpid())
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
ticker = hook._Ticker(hook.Attachment(writer, None))
sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(ticker.tick)

class Takes(torch.autograd.Function):
    "So long in its backward pass."

    @staticmethod
    def forward(ctx, x, ns):
        ctx.ns = ns
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        device.now += ctx.ns
        if ctx.ns < 0:
            raise RuntimeError("of the script")
        return gradient, None

def step(forward=1, backward=2, waits=(), optimizes=4, steps=True):
    device.now += forward
    loss = Takes.apply(torch.ones(1, requires_grad=True), backward).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        assert "of the script" in str(error)
    for ns in waits:
        stream.wait_event(ns)
    if not steps:
        return
    handle = optimizer.register_step_pre_hook(lambda *_: setattr(device, "now", device.now + optimizes))
    optimizer.step()
    handle.remove()

def told():
    return [
        [one.number, one.forward_ns, one.backward_ns, one.optimizer_ns, one.collectives_ns]
        for one in page.device_steps(seen, 0)[0]
    ]

def follow():
    "As at a first step."
    ticker._first, ticker._leader = False, id(optimizer)
    times = ticker._device = device_times.follow(writer, lambda: ticker._leader)
    return times
"""


def beside(folder: Path, code: str) -> Any:
    """What `code` has found, in a process whose CUDA is the stand-in."""
    command = [sys.executable, "-c", f"{STAND_IN}{code}\nprint(json.dumps(found))", str(folder)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])

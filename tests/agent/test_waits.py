"""How long a rank's main thread waits for others, in processes of its kind."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

BEGIN = """
import json, os, sys, threading, time
from elastic.agent import waits
from elastic.proto import page
import torch, torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": sys.argv[3]}
writer = page.PageWriter.claim(page.create(), os.getpid())
waits.follow(writer)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=int(sys.argv[3]))
def waited():
    return writer.words[page.WAITED_NS] / 1e9
def is_late():
    "Computes for as long as the other one waits."
    end = time.monotonic() + 0.5
    while rank and time.monotonic() < end:
        pass
"""
END = """
print(json.dumps({"waited": waited(), "stage": writer.words[page.STAGE], "counted": globals().get("counted")}))
dist.barrier()
"""
COLLECTIVE = "is_late()\ndist.all_reduce(torch.ones(1))\n"
DDP = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
dist.barrier()
before = waited()
class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, gradient):
        is_late()
        return gradient
model(Late.apply(torch.ones(4, 4, requires_grad=True))).sum().backward()
Late.apply(model(torch.ones(4, 4))).sum().backward()
"""
BUFFERS = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(4))
rank = 1 - rank  # whose buffers are sent is late
is_late()
model(torch.ones(4, 4))
"""
THREAD = """
thread = threading.Thread(target=lambda: (is_late(), dist.all_reduce(torch.ones(1))))
thread.start()
thread.join()
if os.fork() == 0:
    waits_for = torch._C._distributed_c10d.Work.wait
    torch.ones(1, requires_grad=True).sum().backward()
    os._exit(0)
os.wait()
"""
PIPELINE = "(dist.recv if rank else dist.send)(torch.ones(1), 1 - rank)\n"
BY_NAME = """
group = dist.group.WORLD
if rank:
    group.recv(tensors=[torch.ones(1)], srcRank=0, tag=0).wait()
else:
    group.send([torch.ones(1)], dstRank=1, tag=0).wait()
"""
COUNTED = """
late = dist.new_group([1, 2])
gone = dist.new_group([0, 1])
def pass_on(source, target, group=None):
    if rank == source:
        dist.send(torch.ones(1), target, group=group)
    elif rank == target:
        dist.recv(torch.ones(1), source, group=group)
for _ in range(3):
    pass_on(0, 1)
pass_on(2, 1, late)
pass_on(1, 2)
if rank < 2:
    pass_on(0, 1, gone)
    dist.destroy_process_group(gone)
counted = [[[one.peer, one.sent, one.received] for one in waits.transfers()]]
os.environ["WORLD_SIZE"] = "6"
counted.append(waits.transfers())
os.environ["WORLD_SIZE"] = "3"
if rank == 1:
    dist.recv(torch.ones(1))
pass_on(0, -1 if rank else 1)
counted.append(waits.transfers() is None)
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=3)
pass_on(2, 1)
counted.append(len(waits.transfers() or ()))
"""


def told(folder: Path, script: str, size: int = 2) -> Sequence[dict[str, Any]]:
    """By so many ranks."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + script + END, str(rank), str(folder), str(size)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.parametrize("script", [COLLECTIVE, DDP])
def test_who_is_late_waits_least(tmp_path: Path, script: str) -> None:
    punctual, late = told(tmp_path, script)
    assert punctual["waited"] > late["waited"] + 0.25
    assert punctual["stage"] == late["stage"] == 0


def test_who_waits_for_buffers(tmp_path: Path) -> None:
    late, punctual = told(tmp_path, BUFFERS)
    assert punctual["waited"] > late["waited"] + 0.25


def test_other_threads_and_forks_wait_for_themselves(tmp_path: Path) -> None:
    assert [rank["waited"] for rank in told(tmp_path, THREAD)] == [0, 0]


@pytest.mark.parametrize("script", [PIPELINE, BY_NAME])
def test_stages_of_a_pipeline_are_known_by_whom_they_send_to(tmp_path: Path, script: str) -> None:
    first, last = told(tmp_path, script)
    assert 0 != first["stage"] != last["stage"] != 0


def test_sends_and_receives_are_counted_by_peer(tmp_path: Path) -> None:
    """Over all groups. A world that is not the job's makes them unknown, and so does a receive from anybody, until there is
    another world."""
    counted = [one["counted"] for one in told(tmp_path, COUNTED, 3)]
    assert counted == [
        [[[1, 4, 0]], None, False, 0],
        [[[0, 0, 4], [2, 1, 1]], None, True, 1],
        [[[1, 1, 1]], None, False, 1],
    ]

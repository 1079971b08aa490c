"""A rank that trains by all-reduce, a data loader's batch a step, until it hangs in the way it is told.

    hangs.py FOLDER STEP STEP_SECONDS cpu|cuda HOW:RANK...

One HOW (see `hang`) a round, in their order; after these nothing hangs. `jitter:STEPS` is none: after so many
steps one of a hundred takes ten times as long, of each rank. Nor is `work:TIMES`: a step is so many products of
matrices in place of STEP_SECONDS asleep. `by-hand-HOW` hangs so too, in a script that no
optimizer steps. A file named "finish" in FOLDER ends it. Ranks share GPUs where there are more of them.
"""

import ctypes
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

FOLDER, STEP, SECONDS = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
CUDA = sys.argv[4] == "cuda"
RANK, ROUND = int(os.environ["RANK"]), int(os.environ["ELASTIC_ROUND"])
GPUS = torch.cuda.device_count() if CUDA else 0
DEVICE = torch.device("cuda", RANK % GPUS) if CUDA else torch.device("cpu")
HOW, _, VICTIM = (sys.argv[5:] + ["", ""] * ROUND)[ROUND - 1].partition(":")
BY_HAND, HOW = HOW.startswith(prefix := "by-hand-"), HOW.removeprefix(prefix)
HANGS = str(RANK) == VICTIM
LOADS = ("worker", "dead", "late")
"""By a worker of the loader's."""
OTHER = 1 << 24
"""Elements of a collective that does not match. NCCL sends few and many in different ways, and of those that it sends in
the same way it may well come to an end."""


def tell(kind: str, **fields: object) -> None:
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(FOLDER / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


class Numbers(Dataset[torch.Tensor]):
    """Batches; the worker that makes the victim's stops for good, or dies."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> torch.Tensor:
        if HANGS and number == STEP and HOW in LOADS:
            tell("hang", how=HOW)
            if HOW == "late":
                time.sleep(max(3.0, 10 * SECONDS))
            else:
                os.kill(os.getpid(), signal.SIGKILL if HOW == "dead" else signal.SIGSTOP)
        return torch.full((4,), float(number))


def endless() -> None:
    number = 0
    while True:
        number += 1


def keep_the_gil() -> None:
    """A regular expression that never comes to its end."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def sleep_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(1 << 20)


def wait_for_the_device(model: torch.nn.Linear) -> None:
    next(model.parameters()).sum().item()


def compute(seconds: float) -> None:
    """As a model does, in a library."""
    end = time.monotonic() + seconds
    factor = torch.randn(512, 512, device=DEVICE)
    while time.monotonic() < end:
        factor = (factor @ factor).softmax(0)


def work(times: int) -> None:
    """The same each time it is called, however long it takes."""
    factor = torch.ones(256, 256, device=DEVICE)
    for _ in range(times):
        factor = (factor @ factor).softmax(0)


def score(model: torch.nn.Linear) -> None:
    """For longer than any step, on one rank, without a word to anybody."""
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        model(torch.randn(64, 4, device=DEVICE)).relu().softmax(0).sort()


def write_slowly() -> None:
    """To where nobody reads for longer than any step."""
    path = FOLDER / "saved"
    os.mkfifo(path)
    reader = subprocess.Popen(["sh", "-c", f"sleep 4; exec cat {path} > /dev/null"])
    torch.save(torch.zeros(1000), path, _use_new_zipfile_serialization=False)
    reader.wait()


def send(seconds: float, *, reads: bool = True) -> None:
    """As an upload, to a slow peer; else to one that never reads."""
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()

    def read_slowly() -> None:
        while far.recv(1 << 16):
            time.sleep(0.02)

    if reads:
        threading.Thread(target=read_slowly, daemon=True).start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        near.sendall(bytes(1 << 20))


def upload(seconds: float) -> None:
    """By a child, as a command-line tool."""
    child = multiprocessing.get_context("fork").Process(target=send, args=(seconds,))
    child.start()
    child.join()


def compile_anew() -> None:
    """For longer than any step, on one rank. Without Inductor, whose first C++ takes a minute here."""

    @torch.compile(backend="aot_eager")
    def layers(value: torch.Tensor) -> torch.Tensor:
        for number in range(1, 150):
            value = (value.sin() * number).softmax(0) + value.cumsum(1).roll(number, 0)
        return value

    layers(torch.randn(64, 64, device=DEVICE))


def hang(model: torch.nn.Linear) -> None:
    """Told beforehand, since nothing comes after it."""
    if HOW in LOADS:
        return
    tell("hang", how=HOW)
    match HOW:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "loop":
            endless()
        case "gil":
            keep_the_gil()
        case "sleep-with-gil":
            sleep_with_the_gil()
        case (
            "skip" | "unsent" | "nothing"
        ):  # skip: what the others wait in; unsent: what its neighbour takes
            pass
        case "mismatch":
            dist.broadcast(torch.zeros(OTHER if CUDA else 3, device=DEVICE), src=RANK)
        case "cross":  # each of the two waits for the other one's
            dist.recv(torch.zeros(1, device=DEVICE), src=RANK ^ 1)
        case "kernel":  # its host goes on to the next thing that waits for the device
            torch.cuda._sleep(1 << 62)  # type: ignore[no-untyped-call]
        case "item":  # its host waits for it there
            torch.cuda._sleep(1 << 62)  # type: ignore[no-untyped-call]
            wait_for_the_device(model)
        case "disk":
            os.listdir(FOLDER / "stuck")
        case "read":
            (FOLDER / "stuck" / "data").read_bytes()
        case "alone":
            score(model)
        case "compiles":
            compile_anew()
        case "sends":
            send(80.0)
        case "uploads":
            upload(80.0)
        case "clogged":
            send(80.0, reads=False)
        case "saves":
            write_slowly()


def main() -> None:
    tell("start")
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if 0 < GPUS < int(os.environ["WORLD_SIZE"]):  # NCCL refuses two ranks on one device of a host
        os.environ |= {"NCCL_HOSTID": str(RANK), "NCCL_SOCKET_IFNAME": "lo"}
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)
    loader = iter(DataLoader(Numbers(), batch_size=1, num_workers=1 if HOW in LOADS else 0))
    model = torch.nn.Linear(4, 4, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    finish = torch.zeros(1, device=DEVICE)
    for step in range(1 << 20):
        batch = next(loader)
        if HOW == "jitter" and step >= int(VICTIM) and random.random() < 0.01:
            random.choice((time.sleep, compute))(10 * SECONDS)
        elif HOW == "work":
            work(int(VICTIM))
        else:
            time.sleep(SECONDS)
        optimizer.zero_grad()
        model(batch.to(DEVICE)).sum().backward()
        if HANGS and step == STEP:
            hang(model)
        if str(RANK ^ 1) == VICTIM and HOW in ("cross", "unsent") and step == STEP:
            dist.recv(torch.zeros(1, device=DEVICE), src=RANK ^ 1)
        if HOW == "skip" and step == STEP and not HANGS:
            dist.all_reduce(torch.zeros(OTHER, device=DEVICE)) if CUDA else dist.barrier()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            if BY_HAND:
                parameter.data.sub_(parameter.grad, alpha=1e-3)
        if not BY_HAND:
            optimizer.step()
        finish[0] = float((FOLDER / "finish").exists())
        dist.all_reduce(finish)
        tell("step", step=step)
        if finish[0]:
            break
    dist.destroy_process_group()
    tell("end")


main()

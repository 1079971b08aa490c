"""A rank: counts steps until a file appears, and tells what it does, a line of JSON each.

With --torch it trains a tiny model by DistributedDataParallel over Gloo, on GPUs over NCCL; without, it
only counts. It goes on from the step that rank 0 wrote last. Imports nothing of Elastic's, as a user's script would.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

RANK, ROUND = int(os.environ["RANK"]), int(os.environ["ELASTIC_ROUND"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--step-time", type=float, default=0.02)
    parser.add_argument("--fault", action="append", default=[], help="WHEN:HOW:RANKS:ROUND")
    parser.add_argument(
        "--child", action="store_true", help="leave a process in a session of its own"
    )
    parser.add_argument(
        "--on-term", choices=("die", "ignore", "work", "hold", "raise", "alarm"), default="die"
    )
    parser.add_argument("--stray", action="store_true", help="leave a process that has ended")
    parser.add_argument("--shared", action="store_true", help="hold shared memory of both kinds")
    parser.add_argument("--store", action="store_true", help="keep a connection to the store")
    parser.add_argument("--print", action="store_true", help="print every step")
    return parser.parse_args()


ARGS = parse()


def tell(kind: str, **fields: object) -> None:
    """Append one line, in one write."""
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(ARGS.folder / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def fault(when: str) -> None:
    for text in ARGS.fault:
        moment, how, ranks, number = text.split(":")
        if moment != when or str(RANK) not in ranks.split(",") or number not in (str(ROUND), "*"):
            continue
        tell("fault", how=how)
        if how in ("exit0", "exit3"):
            sys.exit(int(how[-1]))
        if how == "raise":
            raise ValueError(f"asked to fail at {when}")
        if how == "hang":
            signal.pause()
        if how == "escape":
            raise ValueError("\x1b[31m red \x1b]0;title\x07")
        if how == "stuck":
            os.stat(ARGS.folder / "stuck" / "file")
        if how == "segv":
            ctypes.string_at(0)
        os.kill(os.getpid(), getattr(signal, f"SIG{how.upper()}"))


def leave_child() -> None:
    """A process that nothing of ours started: a grandchild in a session of its own."""
    code = (
        "import os, subprocess as s; "
        "p = s.Popen(['sleep', '100000'], start_new_session=True, stdout=s.DEVNULL); "
        "print(p.pid, flush=True); os._exit(0)"
    )
    tell("child", child=_said(code))


def leave_stray() -> None:
    """A process that ends at once, and whose parent did not wait for it."""
    code = "import os; pid = os.fork(); pid and print(pid, flush=True); os._exit(0)"
    tell("stray", stray=_said(code))


def _said(code: str) -> int:
    """The number that a Python of its own prints. What that complains of where this rank is killed meanwhile is no
    word of a launcher's, whose stderr it has."""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return int(found.stdout)


def share() -> list[object]:
    """Named shared memory, by multiprocessing and by torch; helpers of theirs unlink it."""
    from multiprocessing.shared_memory import SharedMemory

    import torch
    import torch.multiprocessing as sharing

    sharing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    tensor: object = torch.zeros(1 << 18).share_memory_()  # type: ignore[no-untyped-call]
    return [SharedMemory(create=True, size=1 << 20), tensor]


def on_term(number: int, frame: object) -> None:
    tell("term")
    if ARGS.on_term == "raise":
        raise OSError("cannot save")
    if ARGS.on_term == "alarm":
        os.kill(os.getpid(), signal.SIGRTMAX - 1)
    if ARGS.on_term == "work":
        time.sleep(0.5)  # what a script does to save its state
        tell("saved")
        sys.exit(0)
    if ARGS.on_term == "hold":
        while not (ARGS.folder / "finish").exists():
            time.sleep(0.01)
        tell("saved", store=store_answers())
        sys.exit(0)


def store_answers() -> bool:
    try:
        to_store().close()
    except OSError:
        return False
    return True


def to_store() -> socket.socket:
    """A connection to the round's store."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return socket.create_connection(address, timeout=30)


def resume() -> int:
    try:
        return int((ARGS.folder / "step").read_text())
    except FileNotFoundError:
        return 0


def finished(step: int) -> None:
    """A step is over: rank 0 writes it down."""
    tell("step", step=step)
    if ARGS.print:
        print(f"step {step} of rank {RANK}", flush=True)
    if RANK == 0:
        draft = ARGS.folder / "step.part"
        draft.write_text(str(step))
        os.replace(draft, ARGS.folder / "step")


def wanted_end() -> bool:
    finish: Path = ARGS.folder / "finish"
    return finish.exists()


def count(step: int) -> Iterator[int]:
    while not wanted_end():
        time.sleep(ARGS.step_time)
        step += 1
        yield step


def train(step: int) -> Iterator[int]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    device = torch.device(ARGS.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    store = dist.distributed_c10d._get_default_store()
    tell("store", stale=[n for n in range(ROUND) if store.check([f"round {n}"])])
    store.set(f"round {ROUND}", "")
    end = torch.zeros(1, device=device)
    while not end.item():
        model(torch.ones(2, 8, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        end.fill_(float(RANK == 0 and wanted_end()))
        dist.all_reduce(end)
        time.sleep(ARGS.step_time)
        step += 1
        yield step
    del model  # see examples/plain.py
    dist.destroy_process_group()


def main() -> None:
    if ARGS.on_term != "die":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_term)
    # As a process group keeps one.
    kept = to_store() if ARGS.store or ARGS.on_term == "hold" else None
    tell(
        "start",
        world=int(os.environ["WORLD_SIZE"]),
        restarts=os.environ["TORCHELASTIC_RESTART_COUNT"],
    )
    if ARGS.child:
        leave_child()
    if ARGS.stray:
        leave_stray()
    shared = share() if ARGS.shared else []
    fault("start")
    first = resume()
    for step in (train if ARGS.torch else count)(first):
        finished(step)
        if step == first + 3:
            fault("step")
    fault("end")
    del shared
    if kept is not None:
        kept.close()
    tell("end")


main()

"""What goes wrong in a script's own code, its arguments and its packages."""

import argparse
import asyncio
import concurrent.futures
import copy
import decimal
import importlib
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

Args = argparse.Namespace


# --- the script's own code ---


def value_error(args: Args) -> None:
    texts = [
        "expected a schedule with at least one milestone",
        "optimizer got an empty parameter list",
        "Expected input batch_size (8) to match target batch_size (6).",
    ]
    raise ValueError(texts[args.variant])


def key_error(args: Args) -> None:
    batch = {"input_ids": [1, 2, 3]}
    print(batch["attention_mask" if args.variant else "labels"])


def type_error(args: Args) -> None:
    model: Any = None if args.variant else (lambda x: x)
    model(x=1, cache=None)


def attribute_error(args: Args) -> None:
    schedule: Any = None
    schedule.step()


def name_error(args: Args) -> None:
    print(los_s)  # type: ignore[name-defined]  # noqa: F821


def index_error(args: Args) -> None:
    stages = ["embed", "block"]
    print(stages[2])


def zero_division(args: Args) -> None:
    tokens = 0
    print(1e6 / tokens)


def assertion(args: Args) -> None:
    heads, ranks = 12, 5
    if args.variant:
        assert heads % ranks == 0, f"{heads} heads cannot be split over {ranks} ranks"
    assert heads % ranks == 0


def recursion(args: Args) -> None:
    def walk(tree: dict[str, Any]) -> int:
        return 1 + walk(tree["left"])

    tree: dict[str, Any] = {}
    tree["left"] = tree
    walk(tree)


def matmul_shapes(args: Args) -> None:
    import torch

    torch.nn.Linear(16, 32)(torch.randn(8, 24))


def tensor_dtypes(args: Args) -> None:
    import torch

    torch.nn.Linear(16, 32)(torch.ones(8, 16, dtype=torch.long))


def backward_twice(args: Args) -> None:
    import torch

    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def in_place(args: Args) -> None:
    import torch

    weight = torch.ones(4, requires_grad=True)
    out = weight.exp()
    out.add_(1)
    out.sum().backward()  # type: ignore[no-untyped-call]


def no_grad_needed(args: Args) -> None:
    import torch

    torch.ones(4).sum().backward()  # type: ignore[no-untyped-call]


def exit_code(args: Args) -> None:
    print("nothing more to do for this rank", file=sys.stderr)
    sys.exit([1, 3, 42][args.variant])


def exit_message(args: Args) -> None:
    sys.exit("tokenizer and model do not fit: 32000 and 32128 entries")


def hard_exit(args: Args) -> None:
    os._exit(7)


def logged_exit(args: Args) -> None:
    try:
        value_error(args)
    except ValueError as error:
        print(f"ERROR training failed: {error}", file=sys.stderr)
        sys.exit(1)


def unpicklable(args: Args) -> None:
    import torch

    data: Any = torch.arange(8)
    loader = torch.utils.data.DataLoader(
        data, num_workers=1, multiprocessing_context="spawn", collate_fn=lambda rows: rows
    )
    next(iter(loader))


def lock_copied(args: Args) -> None:
    copy.deepcopy({"model": threading.Lock()})


def stop_iteration(args: Args) -> None:
    next(iter([]))


def not_implemented(args: Args) -> None:
    import torch

    class Block(torch.nn.Module):
        pass

    Block()(torch.ones(1))


def in_group(args: Args) -> None:
    raise ExceptionGroup("two of the stages failed", [ValueError("stage 1"), KeyError("stage 2")])


@dataclass(frozen=True)
class Settings:
    depth: int


def frozen(args: Args) -> None:
    Settings(depth=2).depth = 3  # type: ignore[misc]


def chained(args: Args) -> None:
    class TrainingError(Exception):
        pass

    try:
        index_error(args)
    except IndexError as error:
        raise TrainingError("stage 2 cannot be built") from error


def broken_pipe(args: Args) -> None:
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as logger:
        logger.wait()
        assert logger.stdin is not None
        os.write(logger.stdin.fileno(), b"step 1\n")


def tool_failed(args: Args) -> None:
    subprocess.run([sys.executable, "-c", "raise SystemExit(9)"], check=True)


def bad_decimal(args: Args) -> None:
    print(decimal.Decimal("1e-4x"))


def in_thread_pool(args: Args) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(index_error, args).result()


def own_error(args: Args) -> None:
    class CurriculumExhausted(RuntimeError):
        pass

    raise CurriculumExhausted("phase 3 has no samples left")


# --- its packages ---


def no_module(args: Args) -> None:
    names = ["flash_attn", "apex", "deepspeed.ops.adam"]
    __import__(names[args.variant])


def no_name(args: Args) -> None:
    if args.variant:
        from torch.optim import FusedLamb  # type: ignore[attr-defined]  # noqa: F401
    from collections import Mapping  # type: ignore[attr-defined]  # noqa: F401, UP035


def no_library(args: Args) -> None:
    import ctypes

    names = ["libcudart.so.11.0", "libnccl.so.2", "libcudnn_ops_infer.so.8"]
    ctypes.CDLL(names[args.variant])


def undefined_symbol(args: Args) -> None:
    import ctypes

    ctypes.CDLL(os.path.abspath("libfused_kernels.so"), mode=os.RTLD_NOW)


def wrong_elf(args: Args) -> None:
    import ctypes

    with open("libfused.so", "wb") as file:
        file.write(b"\x7fELF\x01\x01\x01" + bytes(57))
    ctypes.CDLL(os.path.abspath("libfused.so"))


def built_without_cuda(args: Args) -> None:
    import torch

    torch.ones(1).cuda()


def newer_runtime(args: Args) -> None:
    """A wheel that asks for a newer C++ runtime than is there."""
    import ctypes

    ctypes.CDLL(os.path.abspath("libnewer.so"))


# --- its settings ---


def no_variable(args: Args) -> None:
    print(os.environ["DATASET_ROOT" if args.variant else "WANDB_PROJECT"])


def bad_yaml(args: Args) -> None:
    import yaml

    with open("config.yaml", "w") as file:
        file.write("model:\n  depth: 12\n width: [1, 2\n")
    with open("config.yaml") as file:
        yaml.safe_load(file)


def bad_json_config(args: Args) -> None:
    with open("ds_config.json", "w") as file:
        file.write('{"train_batch_size": 32,}')
    with open("ds_config.json") as file:
        json.load(file)


def unknown_backend(args: Args) -> None:
    import torch.distributed as dist

    dist.init_process_group("ucx-tcp")


def no_nccl(args: Args) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl")


def bad_device(args: Args) -> None:
    import torch

    torch.device("gpu:0")


# --- time and interrupts ---


def alarm(args: Args) -> None:
    signal.alarm(1)
    time.sleep(60)


def alarm_handler(args: Args) -> None:
    def expired(number: int, frame: object) -> NoReturn:
        raise TimeoutError("the step took longer than 1 s")

    signal.signal(signal.SIGALRM, expired)
    signal.alarm(1)
    time.sleep(60)


def tool_timeout(args: Args) -> None:
    subprocess.run(["sleep", "60"], timeout=0.5, check=True)


def queue_timeout(args: Args) -> None:
    queue.Queue[int]().get(timeout=0.5)


def asyncio_timeout(args: Args) -> None:
    async def fetch() -> None:
        async with asyncio.timeout(0.3):
            await asyncio.sleep(60)

    asyncio.run(fetch())


def torch_timer(args: Args) -> None:
    timer: Any = importlib.import_module("torch.distributed.elastic.timer")

    client = timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
    timer.configure(client)
    with timer.expires(after=0.5, scope="validation"):
        time.sleep(60)


def worker_process(args: Args) -> None:
    """A process of the script's own, which raises."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(len, (3,))


def waits(args: Args) -> None:
    """Until somebody outside does something."""
    with open(f"waiting-{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(120)


def fills_log(args: Args) -> None:
    for number in range(20_000):
        print(f"step {number} loss 2.1 tokens/s 1043 grad norm 0.7 lr 3e-4", file=sys.stderr)

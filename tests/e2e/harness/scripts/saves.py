"""A rank that saves each step with `Checkpointer`, and tells what it has, a line of JSON each.

Trains a small model by DistributedDataParallel over Gloo, on batches that depend on the step alone, so
that whatever happens in between, the same step means the same bits. Ends once FOLDER/finish is there.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from elastic.checkpoint import Checkpointer

PARSER = argparse.ArgumentParser()
PARSER.add_argument("folder", type=Path)
PARSER.add_argument("--width", type=int, default=64)
PARSER.add_argument("--step-time", type=float, default=0.02)
PARSER.add_argument("--save-every", type=int, default=1)
PARSER.add_argument("--persist-every", type=int)
PARSER.add_argument("--keep", type=int)
PARSER.add_argument("--block", type=int, help="a step that cannot be written: a file is in the way")
PARSER.add_argument("--own", type=int, default=0, help="bytes that only this rank has")
PARSER.add_argument("--sharded", type=int, default=0, help="elements of a DTensor, a part a rank")
PARSER.add_argument("--replica-bandwidth", type=int)
PARSER.add_argument("--first-round", type=int, default=1, help="where elastic-run says none")
PARSER.add_argument("--snapshot", default="auto", help="how; with one named, wait for each")
ARGS = PARSER.parse_args()
ALONE = "RANK" not in os.environ
RANK = int(os.environ.get("RANK", "0"))
RESTARTS = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
ROUND = int(os.environ.get("ELASTIC_ROUND", "0")) or ARGS.first_round + RESTARTS


def tell(kind: str, **fields: object) -> None:
    """Append one line, in one write."""
    line = {"kind": kind, "rank": RANK, "round": ROUND, "pid": os.getpid(), **fields}
    line["at"] = time.monotonic()
    with open(ARGS.folder / "told.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def digest(module: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = xxhash.xxh3_64()
    state = optimizer.state_dict()["state"]
    for tensor in [*module.state_dict().values(), *(t for s in state.values() for t in s.values())]:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def own_digest(own: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(own.numpy().tobytes())


def ends_at(step: int) -> bool:
    """Whether this is the last step, the same for all: rank 0 says it one ahead, and nobody gets through
    a step without rank 0. By a file: Gloo's end hangs where its thread still has a tensor of Python's.
    """
    last = ARGS.folder / f"last.{ROUND}"
    if RANK == 0 and not last.exists() and (ARGS.folder / "finish").exists():
        draft = last.with_suffix(".draft")
        draft.write_text(str(step + 1))
        draft.rename(last)
    return last.exists() and step >= int(last.read_text())


def main() -> None:
    tell("start")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, ARGS.width), nn.ReLU(), nn.Linear(ARGS.width, 4))
    if not ALONE:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    own = torch.full((ARGS.own,), RANK, dtype=torch.uint8)
    if ARGS.own:
        state["own"] = own
    mine = torch.zeros(0)
    """This rank's part of a DTensor, which is 0, 1, ... and one more of each for each step."""
    if ARGS.sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        numbers = torch.arange(float(ARGS.sharded))
        sharded = distribute_tensor(numbers, mesh, [Shard(0)], src_data_rank=None)
        state["sharded"], mine = sharded, sharded.to_local()
    first = mine.clone()
    path = ARGS.folder / "checkpoint"
    with Checkpointer(
        path,
        persist_every=ARGS.persist_every,
        keep=ARGS.keep,
        snapshot=ARGS.snapshot,
        replica_bandwidth=ARGS.replica_bandwidth,
    ) as checkpoint:
        tell("loading")
        step = checkpoint.load(state)
        tell(
            "loaded",
            step=step,
            digest=digest(model, optimizer),
            own=own_digest(own),
            sharded=torch.equal(mine, first + step),
        )
        if RANK == 0 and ARGS.block:
            path.mkdir(exist_ok=True)
            (path / f"step-{ARGS.block:08}").write_text("in the way")
        over = False
        while not over:
            generator = torch.Generator().manual_seed(step * 1000 + RANK)
            loss = model(torch.randn(16, 8, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            own += 1
            mine += 1
            had = {"digest": digest(model, optimizer), "own": own_digest(own)}
            tell("computed", step=step, **had)
            if step % ARGS.save_every == 0:
                checkpoint.save(step, state)
                if ARGS.snapshot != "auto":
                    checkpoint.wait()
                    assert checkpoint.wait_ready(every=True)
            tell("step", step=step, sharded=torch.equal(mine, first + step), **had)
            time.sleep(ARGS.step_time)
            over = ends_at(step)
        checkpoint.wait(60)
    tell("end", step=step)


if __name__ == "__main__":
    main()
    if not ALONE:
        dist.destroy_process_group()  # with no model left; see examples/plain.py

"""fsdp2_before.py with Elastic: a rank that dies costs no more than the step that it was in."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastic.checkpoint import Checkpointer

NUMBERS, WIDTH, BLOCKS, BATCH = 8, 128, 3, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint", default="checkpoints/fsdp2")
    args = parser.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", dist.get_node_local_rank()) if gpus else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        for _ in range(BLOCKS)
    ]
    model = nn.Sequential(nn.Linear(NUMBERS, WIDTH), *blocks, nn.Linear(WIDTH, NUMBERS)).to(device)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoint = Checkpointer(args.checkpoint, persist_every=100)
    state = {"model": model, "optimizer": optimizer}
    for step in range(checkpoint.load(state), args.steps):
        chance = torch.Generator().manual_seed(step * world + rank)
        numbers = torch.randn(BATCH, NUMBERS, generator=chance).to(device)
        loss = nn.functional.cross_entropy(model(numbers), numbers.argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpoint.save(step + 1, state)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1} | loss {loss.item():.6f}", flush=True)
    checkpoint.close()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

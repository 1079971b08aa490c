"""FSDP2 in micro-batches and bf16. Learns which of 8 numbers is the largest; on 3 ranks of batches of 48."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUMBERS, WIDTH, BATCH, MICRO = 8, 64, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpus else torch.device("cpu")
    world = dist.get_world_size()

    torch.manual_seed(0)
    inputs = torch.randn(1024, NUMBERS)
    dataset = TensorDataset(inputs, inputs.argmax(1))
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, MICRO, sampler=sampler)

    block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
    model = nn.Sequential(nn.Linear(NUMBERS, WIDTH), block, nn.Linear(4 * WIDTH, NUMBERS)).to(
        device
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (block, model):
        fully_shard(part, mesh=init_device_mesh(device.type, (world,)), mp_policy=policy)
        part.set_gradient_divide_factor(1.0)  # sums: the loss is divided by the whole batch
        part.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        for number, (batch, target) in enumerate(loader, 1):
            last = number % (BATCH // MICRO // world) == 0
            model.set_requires_gradient_sync(last)
            scores = model(batch.to(device)).float()
            error = nn.functional.cross_entropy(scores, target.to(device), reduction="sum")
            loss = error / BATCH
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            error = nn.functional.cross_entropy(
                model(inputs.to(device)).float(), dataset.tensors[1].to(device)
            )
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | loss {error.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()

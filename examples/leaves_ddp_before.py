"""DistributedDataParallel in micro-batches. Learns the length of 16 numbers; on 3 ranks of batches of 48."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, MICRO = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpus else torch.device("cpu")
    world = dist.get_world_size()

    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, MICRO, sampler=sampler)

    layers = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for number, (batch, target) in enumerate(loader, 1):
            last = number % (BATCH // MICRO // world) == 0
            model.require_backward_grad_sync = last
            error = (model(batch.to(device)) - target.to(device)).square().sum()
            loss = error / BATCH * world
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            error = nn.functional.mse_loss(layers(inputs.to(device)), dataset.tensors[1].to(device))
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | loss {error.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # with no model left: DDP would end Gloo from within Python, which may hang

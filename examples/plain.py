"""plain_before.py with Elastic: a rank that dies costs no more than the step that it was in."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic.checkpoint import Checkpointer
from elastic.data import ElasticSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", default="checkpoints/plain")
    args = parser.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpus else torch.device("cpu")

    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    dataset = TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())
    sampler = ElasticSampler(dataset, batch_size=64)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)

    layers = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    checkpoint = Checkpointer(args.checkpoint, persist_every=100)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    step = checkpoint.load(state)
    for epoch in range(sampler.epoch, args.epochs):
        for batch, target in sampler.batches(loader):
            loss = nn.functional.mse_loss(model(batch.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            step += 1
            checkpoint.save(step, state)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} | step {step} | loss {loss.item():.6f}", flush=True)
    checkpoint.close()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # with no model left: DDP would end Gloo from within Python, which may hang

"""FSDP2: a small transformer, sharded over all ranks, on CPUs or GPUs. Learns to sort numbers."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORDS, LENGTH, BATCH = 32, 8, 32


class Sorter(nn.Module):
    """Token ids, [b, 2 * LENGTH], to scores of what follows each, [b, 2 * LENGTH, WORDS]."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(0.02 * torch.randn(2 * LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(2 * LENGTH, device=ids.device)
        hidden = self.words(ids) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.head(hidden)
        return scores


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpus else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = Sorter().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        chance = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        numbers = torch.randint(WORDS, (BATCH, LENGTH), generator=chance)
        row = torch.cat([numbers, numbers.sort(dim=1).values], dim=1).to(device)
        answers = model(row)[:, LENGTH - 1 : -1]
        loss = nn.functional.cross_entropy(answers.flatten(0, 1), row[:, LENGTH:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1} | loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

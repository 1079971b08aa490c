"""`python -m tests.trainer.run.worlds FOLDER`: the same steps in worlds of any size, in exact mode.

Each rank finds each step's loss and norm in hex, and a digest of each parameter that it has at the end.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from elastic.data import Leaf, Leaves
from elastic.trainer.model.gpt import GPT
from elastic.trainer.parallel.layout import Layout, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.run.step import Share, accumulate
from tests.trainer.forks import main, whole
from tests.trainer.model.shapes import GPT2

STEPS = 3
LEAVES = Leaves(batch_size=24, leaf_size=2)


class World(NamedTuple):
    dp: int
    layout: Layout = Layout()
    layers: int = 2


FP32 = Layout(compute=torch.float32)
TP2 = replace(FP32, tp=2, sequence=True)
PP2 = replace(FP32, pp=2)
THREE_D = replace(TP2, pp=2)
WORLDS = {
    "dp1": World(1),
    "dp2": World(2),
    "dp3": World(3),
    "dp5": World(5),
    "dp3-zero0": World(3, Layout(zero=0)),
    "fp32-dp1": World(1, FP32),
    "fp32-dp3": World(3, FP32),
    "fp32-dp1-fast": World(1, replace(FP32, exact=False)),
    "fp32-dp3-fast": World(3, replace(FP32, exact=False)),
    "tp2-dp1": World(1, TP2),
    "tp2-dp2": World(2, TP2),
    "pp2-dp1": World(1, PP2),
    "pp2-dp2": World(2, PP2),
    "pp2-gpipe-dp1": World(1, replace(PP2, schedule="gpipe")),
    "pp2-interleaved-dp1": World(1, Layout(pp=2, virtual=2, schedule="interleaved"), 4),
    "pp2-interleaved-dp2": World(2, Layout(pp=2, virtual=2, schedule="interleaved"), 4),
    "pp2-4-dp1": World(1, Layout(pp=2), 4),
    "pp2-zb-dp1": World(1, Layout(pp=2, virtual=2, schedule="zero-bubble"), 4),
    "pp2-zb-dp2": World(2, Layout(pp=2, virtual=2, schedule="zero-bubble"), 4),
    "tp2-pp2-dp1": World(1, THREE_D),
    "tp2-pp2-dp2": World(2, THREE_D),
}
ALIKE = [
    {"dp1", "dp2", "dp3", "dp5", "dp3-zero0"},
    {"fp32-dp1", "fp32-dp3"},
    {"tp2-dp1", "tp2-dp2"},
    {"pp2-dp1", "pp2-dp2", "pp2-gpipe-dp1"},
    {"pp2-interleaved-dp1", "pp2-interleaved-dp2", "pp2-4-dp1", "pp2-zb-dp1", "pp2-zb-dp2"},
    {"tp2-pp2-dp1", "tp2-pp2-dp2"},
]
"""Which end with the same bits."""
UNLIKE = {"fp32-dp1-fast", "fp32-dp3-fast"}
"""Which do not, without the grid."""


SIZES = {name: world.dp * world.layout.tp * world.layout.pp for name, world in WORLDS.items()}


def train(world: World) -> dict[str, object]:
    config = replace(GPT2, num_layers=world.layers)
    laid = lay_out(
        config,
        world.layout,
        leaf_size=2,
        leaves=LEAVES.count,
        seed=1234,
        std=0.05,
        device=torch.device("cpu"),
    )
    multiple, least = legal(world.layout.schedule, world.layout.pp)
    leaves = replace(LEAVES, multiple=multiple, at_least=least)
    optimizer = torch.optim.AdamW([p for part in laid.parts for p in part.parameters()], lr=1e-2)
    told: list[str] = []
    for step in range(STEPS):
        mine = share(leaves.of(step * leaves.batch_size, laid.place.dp, laid.grid.dp))
        loss = accumulate(laid.runner, laid.gradients, mine, leaves.count, copies=world.layout.tp)
        norm = laid.gradients.norm()
        laid.gradients.clip(norm, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told.append(f"{float(loss).hex()} {float(norm).hex()}")
    return {"steps": told, "parameters": digests(laid.parts)}


def share(leaves: list[Leaf]) -> Share:
    tokens = torch.randint(0, 320, (999, 17), generator=torch.Generator().manual_seed(3))
    samples = torch.cat([tokens[torch.as_tensor(leaf.places) % len(tokens)] for leaf in leaves])
    weights = torch.cat([torch.full((len(leaf.places), 16), leaf.weight / 16) for leaf in leaves])
    return Share(leaves, samples[:, :-1].contiguous(), samples[:, 1:].contiguous(), weights)


def digests(parts: Sequence[GPT]) -> dict[str, str]:
    return {
        name: hashlib.sha256(whole(p).detach().numpy().tobytes()).hexdigest()
        for part in parts
        for name, p in part.named_parameters()
    }


if __name__ == "__main__":
    main(SIZES, lambda name: train(WORLDS[name]))

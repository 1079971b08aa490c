"""`python -m tests.trainer.run.worlds FOLDER`: the same steps in worlds of any size, in exact mode.

Each rank finds each step's loss and norm in hex, a digest of each parameter that it has at the end, how many
graphs were compiled, and what its time went to.
"""

import hashlib
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch._dynamo.utils import counters

from elastic.data import Leaf, Leaves
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.layout import Layout, Part, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.run.host_adamw import HostAdamW
from elastic.trainer.run.loss_scale import LossScale, Policy
from elastic.trainer.run.optimizer import ShardedAdamW
from elastic.trainer.run.step import Share, Stepper
from elastic.trainer.watch.phases import HostStamps, PhaseClock
from tests.trainer.forks import main, whole
from tests.trainer.model.shapes import GPT2
from tests.trainer.program import batch, forward_step

STEPS = 3
LEAF_SIZE = 2


class World(NamedTuple):
    dp: int
    layout: Layout = Layout()
    layers: int = 2
    dropout: float = 0.0
    scale: float = 1.0
    """What losses are multiplied by at first."""
    leaves: int = 8
    """Of a step, over all replicas, of which three and five take some that only pad."""
    frozen: tuple[str, ...] = ()
    """What the names of parameters begin with that are not trained."""


FP32 = Layout(compute=torch.float32)
TP2 = replace(FP32, tp=2, sequence=True)
BF16_TP2 = Layout(tp=2, sequence=True)
PP2 = replace(FP32, pp=2)
THREE_D = replace(TP2, pp=2)
ZERO_BUBBLE = Layout(pp=2, virtual=2, schedule="zero-bubble")
SELECTIVE = Recompute(granularity="selective")
FULL = Recompute(granularity="full")
COMPILED = replace(FP32, compile=True)
FP16 = Layout(compute=torch.float16)
FP16_3D = replace(FP16, tp=2, sequence=True, pp=2)
FINE, TOO_MUCH = 2.0**12, 2.0**40
IN_TWOS = Recompute(granularity="full", num_layers=2)
WORLDS = {
    "dp1": World(1),
    "dp2": World(2),
    "dp3": World(3),
    "dp5-recompute": World(5, Layout(recompute=FULL)),
    "dp3-zero0": World(3, Layout(zero=0)),
    "dp3-zero0-offloaded": World(3, Layout(zero=0, offload="all")),
    "dp3-zero2": World(3, Layout(zero=2)),
    "dp2-zero3-offloaded": World(2, Layout(zero=3, offload="all")),
    "dp2-host-adamw": World(2, Layout(offload="optimizer")),
    "dp2-zero3-recompute": World(2, Layout(zero=3, recompute=IN_TWOS)),
    "fp32-dp1": World(1, FP32),
    "fp32-dp3": World(3, FP32),
    "fp32-dp1-fast": World(1, replace(FP32, exact=False)),
    "fp32-dp3-fast": World(3, replace(FP32, exact=False)),
    "tp2-dp1": World(1, TP2),
    "tp2-dp2-recompute": World(2, replace(TP2, recompute=FULL)),
    "tp2-dp2-zero3": World(2, replace(TP2, zero=3)),
    "tp2-dp1-two-leaves": World(1, BF16_TP2, leaves=2),
    "tp2-dp2-one-leaf": World(2, BF16_TP2, leaves=2),
    "tp2-dp2-one-leaf-zero0": World(2, replace(BF16_TP2, zero=0), leaves=2),
    "pp2-dp1": World(1, PP2),
    "pp2-dp2": World(2, PP2),
    "frozen-pp2-dp1": World(1, PP2, frozen=("embedding", "blocks.0.mlp")),
    "frozen-pp2-zb-dp2-host-adamw": World(
        2,
        replace(PP2, schedule="zero-bubble", offload="optimizer"),
        frozen=("embedding", "blocks.0.mlp"),
    ),
    "pp2-gpipe-dp1": World(1, replace(PP2, schedule="gpipe")),
    "pp2-interleaved-dp1": World(1, Layout(pp=2, virtual=2, schedule="interleaved"), 4),
    "pp2-interleaved-dp2-recompute": World(
        2, Layout(pp=2, virtual=2, schedule="interleaved", recompute=FULL), 4
    ),
    "pp2-4-dp1": World(1, Layout(pp=2), 4),
    "pp2-zb-dp1": World(1, ZERO_BUBBLE, 4),
    "pp2-zb-dp2-selective": World(2, replace(ZERO_BUBBLE, recompute=SELECTIVE), 4),
    "tp2-pp2-dp1": World(1, THREE_D),
    "tp2-pp2-dp2": World(2, THREE_D),
    "fp16-dp1": World(1, FP16, scale=FINE),
    "fp16-dp3-zero3": World(3, replace(FP16, zero=3), scale=FINE),
    "fp16-tp2-pp2-dp1": World(1, FP16_3D, scale=FINE),
    "fp16-tp2-pp2-dp2-recompute": World(2, replace(FP16_3D, recompute=FULL), scale=FINE),
    "fp16-overflows": World(1, FP16, scale=TOO_MUCH),
    "fp16-tp2-pp2-dp2-overflows": World(2, FP16_3D, scale=TOO_MUCH),
    "compiled-dp1": World(1, COMPILED),
    "compiled-dp3-recompute": World(3, replace(COMPILED, recompute=FULL)),
    "dropped-dp1": World(1, FP32, 4, 0.1),
    "dropped-dp3-recompute": World(3, replace(FP32, recompute=IN_TWOS), 4, 0.1),
    "dropped-pp2-dp1": World(1, PP2, 4, 0.1),
    "dropped-pp2-zb-dp2-selective": World(
        2, replace(ZERO_BUBBLE, compute=torch.float32, recompute=SELECTIVE), 4, 0.1
    ),
}
ALIKE = [
    {
        "dp1",
        "dp2",
        "dp3",
        "dp5-recompute",
        "dp3-zero0",
        "dp3-zero2",
        "dp2-zero3-recompute",
        "dp3-zero0-offloaded",
        "dp2-zero3-offloaded",
        "dp2-host-adamw",
    },
    {"fp32-dp1", "fp32-dp3"},
    {"tp2-dp1", "tp2-dp2-recompute", "tp2-dp2-zero3"},
    {"tp2-dp1-two-leaves", "tp2-dp2-one-leaf", "tp2-dp2-one-leaf-zero0"},
    {"pp2-dp1", "pp2-dp2", "pp2-gpipe-dp1"},
    {"frozen-pp2-dp1", "frozen-pp2-zb-dp2-host-adamw"},
    {
        "pp2-interleaved-dp1",
        "pp2-interleaved-dp2-recompute",
        "pp2-4-dp1",
        "pp2-zb-dp1",
        "pp2-zb-dp2-selective",
    },
    {"tp2-pp2-dp1", "tp2-pp2-dp2"},
    {"compiled-dp1", "compiled-dp3-recompute"},
    {"fp16-dp1", "fp16-dp3-zero3"},
    {"fp16-tp2-pp2-dp1", "fp16-tp2-pp2-dp2-recompute"},
    {"dropped-dp1", "dropped-dp3-recompute"},
    {"dropped-pp2-dp1", "dropped-pp2-zb-dp2-selective"},
]
"""Which end with the same bits."""
OVERFLOWN = {"fp16-overflows", "fp16-tp2-pp2-dp2-overflows"}
"""Which leave every step out."""
UNLIKE = {"fp32-dp1-fast", "fp32-dp3-fast"}
"""Which do not, without the grid."""


SIZES = {name: world.dp * world.layout.tp * world.layout.pp for name, world in WORLDS.items()}


def train(world: World) -> dict[str, object]:
    torch.compiler.reset()
    counters.clear()
    config = replace(
        GPT2, num_layers=world.layers, hidden_dropout=world.dropout,
        attention_dropout=world.dropout,
    )  # fmt: skip
    clock = PhaseClock(HostStamps())
    leaves = Leaves(batch_size=LEAF_SIZE * world.leaves, leaf_size=LEAF_SIZE)
    laid = lay_out(
        config,
        world.layout,
        make=lambda part: made(config, part, world.frozen),
        forward_step=forward_step,
        leaf_size=LEAF_SIZE,
        leaves=leaves.count,
        seed=1234,
        device=torch.device("cpu"),
        clock=clock,
    )
    initialize(laid.model, config, 1234, 0.05)
    multiple, least = legal(world.layout.schedule, world.layout.pp)
    leaves = replace(leaves, multiple=multiple, at_least=least)
    stepper = Stepper(laid, leaf_tokens=LEAF_SIZE * config.seq_length)
    kind = HostAdamW if world.layout.offload == "optimizer" else ShardedAdamW
    optimizer = kind(laid.model.parameters(), lr=1e-2)
    scale = LossScale(Policy(initial=world.scale))
    told: list[str] = []
    for step in range(STEPS):
        clock.begin(step + 1)
        mine = share(leaves.of(step * leaves.batch_size, laid.place.dp, laid.grid.dp))
        by = scale.value
        sums = stepper.accumulate(mine, leaves, loss_scale=by)
        norm = stepper.clip(sums, leaves, 0.5, loss_scale=by)
        if scale.update(norm):
            optimizer.step()
        optimizer.zero_grad()
        loss = sums.loss["lm loss"]
        told.append(f"{float(loss).hex()} {float(norm).hex()}")
    return {
        "steps": told,
        "parameters": digests(laid.model),
        "graphs": counters["stats"]["unique_graphs"],
        "phases": clock.take(),
    }


def made(config: GPTConfig, part: Part, frozen: tuple[str, ...]) -> GPT:
    model = GPT(config, part.tp, part.layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return model


def share(leaves: list[Leaf]) -> Share:
    tokens = torch.randint(0, 320, (999, 17), generator=torch.Generator().manual_seed(3))
    places = torch.cat([torch.as_tensor(leaf.places) for leaf in leaves])
    return Share(leaves, batch(tokens[places % len(tokens)]))


def digests(model: nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(whole(p).detach().numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }


if __name__ == "__main__":
    main(SIZES, lambda name: train(WORLDS[name]))

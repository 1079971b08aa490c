"""`python -m tests.trainer.run.moves FOLDER [all]`: what trained under each layout goes on under others.

Each rank finds, of each checkpoint that it loads, how far off its first loss is, relatively, to that of the
layout that has saved it, the names of what it loaded, and those of them that are not the same bits.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from elastic.checkpoint.state.collect import Place
from elastic.data import Leaves, exact
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Laid, Layout, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.run import optimizer as optimizers
from elastic.trainer.run.step import Stepper
from tests.elastic.checkpoint import worlds as checkpoints
from tests.trainer.forks import main, whole
from tests.trainer.model.shapes import GPT2
from tests.trainer.program import forward_step
from tests.trainer.run.worlds import share

STEPS = 1
CONFIG = replace(GPT2, num_layers=4)
LEAVES = Leaves(batch_size=8, leaf_size=2)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class World(NamedTuple):
    dp: int
    layout: Layout


ONE = Layout(compute=torch.float32)
TP2 = replace(ONE, tp=2, sequence=True)
PP2 = replace(ONE, pp=2)
TWICE = replace(PP2, virtual=2, schedule="interleaved")
WORLDS = {
    "one": World(1, ONE),
    "dp2-zero0": World(2, replace(ONE, zero=0)),
    "tp2-dp2-zero3": World(2, replace(TP2, zero=3)),
    "pp2": World(1, PP2),
    "dp3": World(3, ONE),
    "tp2": World(1, replace(TP2, sequence=False)),
    "pp2-interleaved": World(1, TWICE),
    "dp2-zero2": World(2, replace(ONE, zero=2)),
    "tp4": World(1, replace(TP2, tp=4)),
    "dp4-zero3": World(4, replace(ONE, zero=3)),
    "pp2-dp2": World(2, PP2),
    "dp2-host-adamw": World(2, replace(ONE, offload="optimizer")),
    "tp2-pp2": World(1, replace(TP2, pp=2)),
    "dp2": World(2, ONE),
    "pp4": World(1, replace(ONE, pp=4, schedule="gpipe")),
    "tp2-dp2": World(2, TP2),
    "dp2-zero3-offloaded": World(2, replace(ONE, zero=3, offload="all")),
    "tp2-pp2-zero-bubble": World(1, replace(TP2, pp=2, virtual=2, schedule="zero-bubble", zero=0)),
    "pp2-dp2-zero0-interleaved": World(2, replace(TWICE, zero=0)),
}
"""Neighbours are unlike: two of them are what each loads by default."""
SIZES = {name: world.dp * world.layout.tp * world.layout.pp for name, world in WORLDS.items()}


def loads(name: str, *, everything: bool) -> list[str]:
    """Whose checkpoints it loads."""
    names = list(WORLDS)
    start = names.index(name) + 1
    return names if everything else [names[(start + k) % len(names)] for k in range(2)]


class Trained:
    """A model that is laid out, and its optimizer."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.laid: Laid = lay_out(
            CONFIG, world.layout, make=lambda part: GPT(CONFIG, part.tp, part.layers),
            forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=seed,
            device=torch.device("cpu"),
        )  # fmt: skip
        initialize(self.laid.model, CONFIG, seed, 0.05)
        multiple, least = legal(world.layout.schedule, world.layout.pp)
        self.leaves = replace(LEAVES, multiple=multiple, at_least=least)
        self.stepper = Stepper(self.laid, leaf_tokens=2 * CONFIG.seq_length)
        self.optimizer = optimizers.build(
            self.laid.model,
            betas=(0.9, 0.99),
            eps=1e-8,
            on_host=world.layout.offload == "optimizer",
        )

    @property
    def state(self) -> dict[str, Any]:
        tops = self.laid.gradients.tops
        return {"model": self.laid.model, "optimizer": self.optimizer, "tops": tops}

    def loss(self, step: int) -> float:
        """Of that step, whose gradients are there afterwards."""
        place, grid = self.laid.place, self.laid.grid
        mine = share(self.leaves.of(step * LEAVES.batch_size, place.dp, grid.dp))
        sums = self.stepper.accumulate(mine, self.leaves)
        self.stepper.clip(sums, self.leaves, 1.0)
        return float(sums.totals["lm loss"][0] / sums.totals["lm loss"][1])

    def train(self) -> None:
        optimizers.set_rates(self.optimizer, 1e-2, 0.1)
        for step in range(STEPS):
            self.loss(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def spoil(self) -> None:
        """So that nothing is there but what is loaded."""
        with torch.no_grad():
            for parameter in self.laid.model.parameters():
                parameter.fill_(float("nan"))
            self.laid.gradients.tops.fill_(exact.UNKNOWN)
        on_host = self.world.layout.offload == "optimizer"
        self.optimizer = optimizers.build(
            self.laid.model, betas=(0.5, 0.5), eps=1.0, on_host=on_host
        )

    def tensors(self) -> dict[str, Tensor]:
        """All parameters of this rank and their moments, whole, and the tops. A collective."""
        found: dict[str, Tensor] = {"tops": self.laid.gradients.tops.clone()}
        for name, parameter in self.laid.model.named_parameters():
            moments = self.optimizer.state[parameter]
            found |= {f"{name} {key}": whole(moments[key]).cpu().clone() for key in MOMENTS}
            found[name] = whole(parameter.detach()).cpu().clone()
        return found


def here() -> Place:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Place(rank=rank, world_size=size, local_rank=rank, local_world_size=size)


def save(name: str) -> None:
    trained = Trained(WORLDS[name], seed=1)
    trained.train()
    checkpoints.write(FOLDER / name, trained.state, here())
    truth, place = trained.tensors(), trained.laid.place
    truth["next loss"] = torch.tensor(trained.loss(STEPS), dtype=torch.float64)
    if (place.dp, place.tp) == (0, 0):
        save_file(truth, FOLDER / name / f"stage-{place.pp}.truth")


def load(name: str) -> dict[str, Any]:
    trained = Trained(WORLDS[name], seed=2)
    return {saved: loaded(trained, saved) for saved in loads(name, everything=EVERYTHING)}


def loaded(trained: Trained, saved: str) -> dict[str, Any]:
    truth: dict[str, Tensor] = {}
    for file in (FOLDER / saved).glob("stage-*.truth"):
        truth |= load_file(file)
    trained.spoil()
    complaints = checkpoints.read(FOLDER / saved, trained.state, here())
    assert not complaints, complaints
    found = trained.tensors()
    if (
        "head.weight" in found and "head.weight" not in truth
    ):  # one with the embedding, where it was saved
        truth |= {
            key.replace("embedding.words", "head"): value
            for key, value in truth.items()
            if key.startswith("embedding.words.weight")
        }
    off = trained.loss(STEPS) / float(truth["next loss"]) - 1
    trained.optimizer.zero_grad()
    return {
        "loss": abs(off),
        "names": sorted(found),
        "differ": [name for name in found if not torch.equal(found[name], truth[name])],
    }


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    EVERYTHING = "all" in sys.argv[2:]
    main(SIZES, save)
    main(SIZES, load)

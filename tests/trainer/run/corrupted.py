"""`python -m tests.trainer.run.corrupted FOLDER`: replicas that are compared behind each step, in worlds of which a rank
may have a wrong bit behind the second step. Each rank finds behind which steps all was well, and what was said.
"""

from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elastic.data import Leaves
from elastic.proto.errors import UsageError
from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.init import initialize
from elastic.trainer.parallel.layout import Laid, Layout, lay_out
from elastic.trainer.parallel.pipeline import legal
from elastic.trainer.parallel.sharding import sharded
from elastic.trainer.run.host_adamw import HostAdamW
from elastic.trainer.run.optimizer import ShardedAdamW
from elastic.trainer.run.replicas import Replicas
from elastic.trainer.run.step import Stepper
from tests.trainer.forks import main
from tests.trainer.model.shapes import GPT2
from tests.trainer.program import forward_step
from tests.trainer.run.worlds import share

STEPS = 3
LEAVES = Leaves(batch_size=8, leaf_size=2)
WORD = "embedding.words.weight"
UP = "blocks.0.mlp.up.weight"


class Case(NamedTuple):
    dp: int
    layout: Layout = Layout(zero=0)
    flips: tuple[tuple[int, str], ...] = ()
    """On which rank a bit of what turns over; of "gathered", of what it is sent by others."""


ZERO = Layout(zero=0)
TP2 = replace(ZERO, tp=2, sequence=True)
PP2 = replace(ZERO, pp=2)
FAST = replace(ZERO, exact=False)
CASES = {
    "dp2": Case(2),
    "dp3-fast": Case(3, FAST),
    "dp4": Case(4),
    "dp2-tp2": Case(2, TP2),
    "dp2-pp2": Case(2, PP2),
    "dp2-pp2-zero-bubble": Case(2, replace(PP2, schedule="zero-bubble")),
    "dp2-host": Case(2, replace(ZERO, offload="optimizer")),
    "dp2-all-on-host": Case(2, replace(ZERO, offload="all")),
    "dp3-zero1": Case(3, Layout(zero=1)),
    "dp2-zero2": Case(2, Layout(zero=2)),
    "dp2-zero3": Case(2, Layout(zero=3)),
    "dp2-tp2-zero1": Case(2, replace(TP2, zero=1)),
    "dp2-pp2-zero1": Case(2, replace(PP2, zero=1)),
    "odd dp3": Case(3, ZERO, ((1, UP),)),
    "odd dp4": Case(4, ZERO, ((3, WORD),)),
    "odd dp3-fast": Case(3, FAST, ((0, UP),)),
    "odd moments": Case(3, ZERO, ((2, f"{UP} exp_avg_sq"),)),
    "odd two of four": Case(4, ZERO, ((1, UP), (2, WORD))),
    "half of four": Case(4, ZERO, ((1, UP), (2, UP))),
    "odd dp2": Case(2, ZERO, ((1, UP),)),
    "odd dp2-tp2": Case(2, TP2, ((3, UP),)),
    "odd dp2-pp2": Case(2, PP2, ((1, "head.weight"),)),
    "odd zero1": Case(3, Layout(zero=1), ((1, "gathered"),)),
    "odd zero3": Case(3, Layout(zero=3), ((2, "gathered"),)),
    "odd shard": Case(3, Layout(zero=1), ((1, UP),)),
}
SIZES = {name: case.dp * case.layout.tp * case.layout.pp for name, case in CASES.items()}


def find(name: str) -> dict[str, Any]:
    case = CASES[name]
    laid = lay_out(
        GPT2, case.layout, make=lambda part: GPT(GPT2, part.tp, part.layers),
        forward_step=forward_step, leaf_size=2, leaves=LEAVES.count, seed=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    initialize(laid.model, GPT2, 1, 0.05)
    multiple, least = legal(case.layout.schedule, case.layout.pp)
    leaves = replace(LEAVES, multiple=multiple, at_least=least)
    stepper = Stepper(laid, leaf_tokens=2 * GPT2.seq_length)
    kind = HostAdamW if case.layout.offload == "optimizer" else ShardedAdamW
    optimizer = kind(laid.model.parameters(), lr=1e-2)
    replicas = Replicas(laid, optimizer, None, zero=case.layout.zero, interval=1)
    same: list[int] = []
    try:
        for step in range(STEPS + 1):
            if step:
                mine = leaves.of((step - 1) * leaves.batch_size, laid.place.dp, laid.grid.dp)
                stepper.clip(stepper.accumulate(share(mine), leaves), leaves, 0.5)
                optimizer.step()
                optimizer.zero_grad()
            if step == 2:
                spoil(case, laid, optimizer)
            replicas.check(step)
            same.append(step)
    except UsageError as error:
        return {"same": same, "said": str(error)}
    return {"same": same, "said": ""}


def spoil(case: Case, laid: Laid, optimizer: torch.optim.Optimizer) -> None:
    for rank, name in case.flips:
        if rank != dist.get_rank():
            continue
        if name == "gathered":
            spoil_what_comes(laid)
            continue
        of, _, moment = name.partition(" ")
        parameter = laid.model.get_parameter(of)
        flip(optimizer.state[parameter][moment] if moment else parameter)


def spoil_what_comes(laid: Laid) -> None:
    """A bit of what is gathered from now on."""
    piece = cast(Any, next(iter(sharded(laid.programs[0]))))
    inner = type(piece).unshard

    def unshard(one: FSDPModule) -> None:
        inner(one)
        if one is piece:
            flip(next(iter(cast(Any, one).parameters(recurse=True))))

    type(piece).unshard = unshard


def flip(tensor: Tensor) -> None:
    """The lowest bit of one number."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        part.detach().view(-1).view(torch.uint8)[4 * (part.numel() // 3) % part.nbytes] ^= 1


if __name__ == "__main__":
    main(SIZES, find)

"""`pretrain_gpt`, in whose first round a bit of a parameter turns over: FLIP is `STEP:RANK:NAME`, behind so many
optimizer steps."""

import functools
import os

import torch
from torch.distributed.tensor import DTensor

from elastic.trainer import pretrain_gpt
from elastic.trainer.pretrain import pretrain
from elastic.trainer.run.feed import Feed
from elastic.trainer.run.loop import Loop


def flip() -> None:
    wanted, rank, name = os.environ["FLIP"].split(":")
    inner = Loop._step

    @functools.wraps(inner)
    def flipped(loop: Loop, feed: Feed, step: int) -> None:
        inner(loop, feed, step)
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and step + 1 == int(wanted) and os.environ["RANK"] == rank:
            parameter = loop._run.laid.model.get_parameter(name)
            assert isinstance(parameter, DTensor)
            parameter.to_local().detach().view(-1).view(torch.int32)[5] ^= 1

    setattr(Loop, "_step", flipped)  # noqa: B010 - the type of what wraps differs


if __name__ == "__main__":
    flip()
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        None,
        pretrain_gpt.forward_step,
    )

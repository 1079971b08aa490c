"""Train a GPT: `elastic-run ... -m elastic.trainer.pretrain_gpt`, with Megatron's arguments."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastic.trainer.current import current
from elastic.trainer.data.gpt_dataset import datasets
from elastic.trainer.data.splits import Splits
from elastic.trainer.model.gpt import GPT
from elastic.trainer.parallel.program import Batch, LossFunction
from elastic.trainer.pretrain import get_timers, pretrain
from elastic.trainer.run.told import OF_SOURCE
from elastic.trainer.watch import sources


def train_valid_test_datasets_provider(samples: Sequence[int | None]) -> tuple[Any, Any, Any]:
    """Datasets of so many samples, or of all, from --data-path or its like."""
    run = current()
    return datasets(run.settings.data, run.tokenizer, Splits(*samples))


def model_provider(pre_process: bool = True, post_process: bool = True) -> nn.Module:
    """This stage of the model; what it has follows from its blocks."""
    run = current()
    assert run.part is not None
    return GPT(run.config, run.part.tp, run.part.layers)


def forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, LossFunction]:
    """A leaf's losses, and how they become its loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = next(batches)
    timer.stop()
    mask = batch["loss_mask"]
    positions = batch["position_ids"] if current().settings.data.reset_position_ids else None

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, count = (losses * mask).sum(), mask.sum()
        reports = {"lm loss": torch.stack((total.detach(), count))}
        if len(names := current().sources) > 1:
            found = sources.of_leaf(losses.detach(), mask, batch["dataset_id"], len(names))
            reports |= {OF_SOURCE + name: of for name, of in zip(names, found, strict=True)}
        return total, count, reports

    losses = model(batch["tokens"], positions, None, labels=batch["labels"], loss_mask=mask)
    return losses, loss


if __name__ == "__main__":
    pretrain(train_valid_test_datasets_provider, model_provider, None, forward_step)

"""What a script looks at beside the loss, at each evaluation: Megatron's `process_non_loss_data_func`.

What it is given is what the loss function returns for a batch, or `non_loss_data_func` for the model. As in
Megatron it runs where TensorBoard is written, which is rank 0 here, and only with --tensorboard-dir.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from elastic.data import Leaves
from elastic.proto.errors import UsageError
from elastic.trainer.data.items import Dataset
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.parallel.program import Batch, ForwardStep, LossFunction, returned
from elastic.trainer.run.feed import Feed
from elastic.trainer.watch.evaluation import Reading


@dataclass(kw_only=True, slots=True)
class NonLoss:
    """A script's two functions, and what is collected for them."""

    process: Callable[[Any, int, Any], object] | None
    """Is given what was collected, the number of finished steps, and TensorBoard's writer."""
    of_model: Callable[[list[nn.Module]], Any] | None
    """Is given this rank's stages, on every rank, and returns what is collected, in place of..."""
    step: ForwardStep
    """...what the loss functions of its leaves return with `non_loss_data=True`."""
    _found: list[Any] | None = field(default=None, init=False)

    def check(self, pp: int) -> None:
        """Raises `UsageError` where `pp` stages are too many."""
        if self.process is not None and self.of_model is None and pp > 1:
            raise UsageError(
                "process_non_loss_data_func: a pipeline's last stage has the losses' data, and rank 0 writes "
                "to TensorBoard: give non_loss_data_func, too, or --pipeline-model-parallel-size 1"
            )

    def forward_step(
        self, batches: Iterator[Batch], model: nn.Module
    ) -> tuple[Tensor, LossFunction]:
        """`step`, whose loss functions are asked for the other thing while that is collected."""
        output, of_loss = returned(self.step(batches, model))
        found = self._found
        if found is None:
            return output, of_loss

        def collect(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            found.append(cast(Any, of_loss)(output, non_loss_data=True))
            return torch.zeros((), device=output.device), {}

        return output, collect

    @torch.no_grad()
    def collected(self, laid: Laid, dataset: Dataset, reading: Reading, leaves: Leaves) -> Any:
        """All ranks call it, after an evaluation: of the next batch of its set, this rank's leaves."""
        if self.of_model is not None:
            with _gathered(laid):
                return self.of_model([program.model for program in laid.programs])
        if self.process is None:
            return None
        first = reading.first + reading.samples
        mine = [
            replace(leaf, places=leaf.places % reading.length)
            for leaf in leaves.of(first, laid.place.dp, laid.grid.dp)
        ]
        feed = Feed(dataset, iter([mine]), device=laid.device, workers=0)
        self._found = []
        try:
            share = next(feed)
            laid.runner.evaluate(share.batch, len(mine))
            real = sum(leaf.number < leaves.count for leaf in mine)  # padding comes last
            return self._found[:real]
        finally:
            feed.close()
            self._found = None

    def tell(self, found: Any, step: int, writer: Any) -> None:
        """writer: TensorBoard's, on the rank that has one."""
        if self.process is not None and writer is not None:
            self.process(found, step, writer)


@contextmanager
def _gathered(laid: Laid) -> Iterator[None]:
    """A stage's embedding and head are there, as they are while its leaves run."""
    for program in laid.programs:
        cast(FSDPModule, program).unshard()
    yield
    for program in laid.programs:
        cast(FSDPModule, program).reshard()

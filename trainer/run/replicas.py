"""The run's data-parallel replicas, compared bit for bit: a rank that computes or keeps something wrong is named."""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elastic import replicas
from elastic.checkpoint import Checkpointer
from elastic.proto.errors import UsageError
from elastic.trainer.parallel.layout import Laid
from elastic.trainer.parallel.sharding import gathered

FLAG = "--check-weight-hash-across-dp-replicas-interval"


def note(dp: int, *, zero: int) -> str:
    """What is said at start of what is compared. zero: ZeRO's stage."""
    if dp == 1:
        return f"{FLAG} has no effect: there is one replica, so nothing is there twice"
    if zero == 0:
        return f"{dp} replicas are compared: parameters, and what the optimizer keeps on the device"
    return (
        f"{dp} replicas are compared in what each gathers of the parameters; ZeRO {zero} keeps parameters and "
        "moments themselves on one rank each, and what that keeps wrongly is the same for all: --zero-stage 0 "
        "compares them, too"
    )


class Replicas:
    """Looks at them as they are between two steps."""

    def __init__(
        self,
        laid: Laid,
        optimizer: torch.optim.Optimizer,
        checkpoint: Checkpointer | None,
        *,
        zero: int,
        interval: int,
    ) -> None:
        """checkpoint: told what of it is not to be trusted; zero: ZeRO's stage; interval: steps from one check to the next."""
        self._laid, self._optimizer = laid, optimizer
        self._checkpoint = checkpoint
        self._zero, self._interval = zero, interval
        self._same: int | None = None
        """The newest step after which all were the same, in this life of the run."""
        self._compared: int | None = None
        """The step after which what they hold now was compared."""

    def due(self, step: int) -> bool:
        """Whether a check is, after so many steps."""
        return step % self._interval == 0

    def check(self, step: int) -> bool:
        """Whether they were compared, which after one step is done once. Raises UsageError, on all ranks of the world
        and with the same words, where they differ. step: finished ones. All ranks call it."""
        if self._compared == step:
            return False
        found = replicas.compare_sums(self._sums(), self._laid.mesh["dp"].get_group())
        heard = self._heard("" if found is None else json.dumps((str(found), found.suspects)))
        if heard:
            words, suspects = json.loads(heard)
            raise UsageError(self._stopping(words, suspects, step))
        self._same = self._compared = step
        return True

    def forget(self) -> None:
        """They hold something else: what was loaded."""
        self._compared = None

    def _sums(self) -> dict[str, Tensor]:
        if self._zero == 0:
            found = replicas.tensors(self._laid.model, self._optimizer)
            return {name: replicas.checksum(one) for name, one in found.items()}
        return {
            name: replicas.checksum(one)
            for program in self._laid.programs
            for name, one in gathered(program)
        }

    def _stopping(self, words: str, suspects: Sequence[int], step: int) -> str:
        """Why the run ends; what was saved since replicas were the same is not loaded again."""
        trusted = step if self._same is None else self._same
        kept_in_mind = self._checkpoint is not None and self._checkpoint.distrust(
            trusted, f"after step {step}: {words}", suspects
        )
        if self._same is None:
            return (
                f"with step {step}, before any was taken: {words}: stopping; what was loaded or drawn did not get to "
                "all ranks as it is, and the checkpoint itself may be sound"
            )
        job = "this job loads nothing newer, but another one is to" if kept_in_mind else "it is to"
        return (
            f"after step {step}: {words}; after step {self._same} all were the same: stopping; the newest "
            f"checkpoint to trust is that of step {self._same} or one before it: {job} go back to it, by --load, "
            "--ckpt-step and a new --save; look at the device"
        )

    def _heard(self, own: str) -> str:
        """What the first rank says that has something to say: a rank knows its own replicas alone."""
        device, rank, size = self._laid.device, dist.get_rank(), dist.get_world_size()
        first = torch.tensor(size - rank if own else 0, device=device)
        dist.all_reduce(first, dist.ReduceOp.MAX)
        if not int(first):
            return ""
        source = size - int(first)
        text = own.encode()
        length = torch.tensor(len(text), device=device)
        dist.broadcast(length, src=source)
        sent = torch.zeros(int(length), dtype=torch.uint8, device=device)
        if rank == source:
            sent.copy_(torch.tensor(list(text), dtype=torch.uint8))
        dist.broadcast(sent, src=source)
        return bytes(sent.tolist()).decode()

"""What ranks that share layers have in common."""

from collections.abc import Sequence

import torch

from elastic.proto.errors import UsageError
from elastic.trainer.current import current
from elastic.trainer.megatron import absent
from elastic.trainer.parallel.program import Batch

__getattr__ = absent.attributes(__name__)


def broadcast_data(keys: Sequence[str], data: Batch | None, datatype: torch.dtype) -> Batch:
    """What the leaf `data` has under `keys`; every rank reads its own. `text`: its tokens and the one behind
    them, [b, S + 1], as datasets had it until 2023."""
    if data is None:
        raise UsageError(
            "broadcast_data: every rank has a data iterator here, so call next() on it"
        )
    found = dict(data)
    if "text" in keys:
        if current().settings.evaluation.full_validation:
            raise UsageError(
                "--full-validation fills batches up with samples that do not count, which a loss mask "
                "made of `text` does not know: take get_batch_on_this_tp_rank"
            )
        found["text"] = torch.cat((data["tokens"], data["labels"][:, -1:]), dim=1)
    if lacking := [key for key in keys if key not in found]:
        raise UsageError(
            f"broadcast_data: samples have no {lacking[0]}, they have {', '.join(data)}"
        )
    return {key: found[key].to(datatype) for key in keys}

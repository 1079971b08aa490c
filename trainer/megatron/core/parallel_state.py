"""This rank's place among the others."""

import torch.distributed as dist

from elastic.proto.errors import UsageError
from elastic.trainer.current import current
from elastic.trainer.megatron import absent
from elastic.trainer.parallel.grid import Grid, Place

__getattr__ = absent.attributes(__name__)


def _grid() -> Grid:
    layout = current().settings.parallel()
    return Grid.of(dist.get_world_size(), tp=layout.tp, pp=layout.pp)


def _place() -> Place:
    return _grid().place(dist.get_rank())


def _group(axis: str) -> dist.ProcessGroup:
    laid = current().laid
    if laid is None:
        raise UsageError("there are groups of ranks once the model is laid out, not before")
    return laid.group(axis)


# --- how many, and which of them -----------------------------------------------------------------


def get_tensor_model_parallel_world_size() -> int:
    return _grid().tp


def get_tensor_model_parallel_rank() -> int:
    return _place().tp


def get_pipeline_model_parallel_world_size() -> int:
    return _grid().pp


def get_pipeline_model_parallel_rank() -> int:
    return _place().pp


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Stages of a rank; None where it has one."""
    virtual = current().settings.parallel().virtual
    return virtual if virtual > 1 else None


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    return _grid().dp


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    return _place().dp


def get_context_parallel_world_size() -> int:
    return 1


def get_context_parallel_rank() -> int:
    return 0


# --- stages --------------------------------------------------------------------------------------


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether stage `vp_stage` of this rank is the pipeline's first; without a number, whether one is."""
    return _place().pp == 0 and (ignore_virtual or vp_stage in (None, 0))


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """The same of the last."""
    last = current().settings.parallel().virtual - 1
    return _place().pp == _grid().pp - 1 and (ignore_virtual or vp_stage in (None, last))


# --- global numbers of ranks, and groups -----------------------------------------------------------


def get_tensor_model_parallel_src_rank() -> int:
    """The first of those that share this rank's layers."""
    return _grid().rank(_place()._replace(tp=0))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Its like in the first replica."""
    return _grid().rank(_place()._replace(dp=0))


def get_pipeline_model_parallel_first_rank() -> int:
    return _grid().rank(_place()._replace(pp=0))


def get_pipeline_model_parallel_last_rank() -> int:
    return _grid().rank(_place()._replace(pp=_grid().pp - 1))


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    return _group("tp")


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    return _group("pp")


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    return _group("dp")

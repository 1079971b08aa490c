"""Megatron core's modules."""

from elastic.trainer.megatron.core import parallel_state, tensor_parallel
from elastic.trainer.megatron.core import parallel_state as mpu

__all__ = ["mpu", "parallel_state", "tensor_parallel"]

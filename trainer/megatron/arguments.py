"""Where `training.arguments` was until 2024."""

from elastic.trainer.megatron import absent
from elastic.trainer.megatron.training.arguments import core_transformer_config_from_args

__all__ = ["core_transformer_config_from_args"]

__getattr__ = absent.attributes(__name__)

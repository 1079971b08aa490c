"""The model's shape, from arguments."""

from copy import copy
from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.megatron import absent

__getattr__ = absent.attributes(__name__)


def core_transformer_config_from_args(args: Any, config_class: Any = None) -> Any:
    """What `GPTModel` takes: the arguments, by the names that Megatron's configuration shares with them."""
    if config_class is not None:
        raise UsageError(
            "core_transformer_config_from_args makes no config_class here: leave it out"
        )
    return copy(args)

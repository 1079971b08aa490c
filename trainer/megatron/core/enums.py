"""Kinds of models."""

from enum import Enum

from elastic.trainer.megatron import absent

__getattr__ = absent.attributes(__name__)


class ModelType(Enum):
    """What `pretrain` is given; there is one kind."""

    encoder_or_decoder = 1

"""Where the model was until 2024."""

from elastic.trainer.megatron import absent
from elastic.trainer.megatron.core.enums import ModelType
from elastic.trainer.megatron.core.models.gpt import GPTModel

__all__ = ["GPTModel", "ModelType"]

__getattr__ = absent.attributes(__name__)

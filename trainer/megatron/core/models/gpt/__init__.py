"""GPT, as Megatron core's."""

from elastic.trainer.megatron.core.models.gpt.gpt_model import GPTModel

__all__ = ["GPTModel"]

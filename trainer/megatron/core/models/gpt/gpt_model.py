"""The model under Megatron's name, made with Megatron's parameters."""

from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.current import Current, current
from elastic.trainer.megatron import absent
from elastic.trainer.model.gpt import GPT

__getattr__ = absent.attributes(__name__)


class GPTModel(GPT):
    """This stage of the run's model. Its shape is the arguments'; who asks for another is told so.

    Raises `UsageError`.
    """

    vp_stage: int | None = None
    """A rank that has several stages reads its leaves for each."""

    def __init__(self, config: Any, transformer_layer_spec: Any = None, **said: Any) -> None:
        """config: of `core_transformer_config_from_args`. said: Megatron's other parameters, by name."""
        run = current()
        if run.part is None:
            raise UsageError("GPTModel is made by the model_provider that pretrain() is given")
        known = _known(run)
        for name, value in {**_shape(config), **said}.items():
            if name not in known:
                raise UsageError(f"GPTModel takes no {name} here: leave it out")
            if value != known[name]:
                raise UsageError(
                    f"GPTModel: {name} is {value}, and {known[name]} by the run's arguments: give those"
                )
        super().__init__(run.config, run.part.tp, run.part.layers)


def _shape(config: Any) -> dict[str, Any]:
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return {name: getattr(config, name) for name in names}


def _known(run: Current) -> dict[str, Any]:
    """What each parameter has to be, if it is given."""
    config, flags, part = run.config, run.settings.model, run.part
    assert part is not None
    return _shape(config) | {
        "vocab_size": config.vocab_size, "max_sequence_length": config.positions,
        "pre_process": part.first, "post_process": part.last, "parallel_output": True,
        "share_embeddings_and_output_weights": config.tied,
        "position_embedding_type": flags.position_embedding_type,
        "rotary_percent": config.rotary_percent, "rotary_base": config.rotary_base,
        "fp16_lm_cross_entropy": False, "rope_scaling": False, "rope_scaling_factor": 8.0,
        "scatter_embedding_sequence_parallel": True, "seq_len_interpolation_factor": None,
        "mtp_block_spec": None, "num_tokentypes": 0, "pg_collection": None, "vp_stage": None,
    }  # fmt: skip

"""A trained model, wherever it lies: read tensor by tensor, without its optimizer, by whatever layout it was
written, and written so that training can start from it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from elastic.checkpoint import stored
from elastic.checkpoint.storage.connect import connect
from elastic.checkpoint.storage.protocol import canonical
from elastic.checkpoint.tools import inspection
from elastic.proto.errors import CheckpointError, UsageError
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.gpt import GPT

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A model that is not in memory."""

    config: GPTConfig
    tensor: Callable[[str], Tensor]
    """A parameter by its name, whole, on the CPU, in the dtype in which it lies."""
    vocabulary: int | None = None
    """Words without those that pad; None: it was not written down."""
    step: int = 0
    """Steps of training, where that is known."""


def identity_of(config: GPTConfig) -> dict[str, Any]:
    """What a checkpoint says of its model, under `identity`; a run adds what else it must be again for it."""
    return asdict(config)


def config_of(identity: object, path: str) -> GPTConfig:
    """The way back. path: of the checkpoint, for the message. Raises `CheckpointError`."""
    known = {field.name for field in fields(GPTConfig)}
    try:
        given = cast(Mapping[str, Any], identity)
        return GPTConfig(**{name: given[name] for name in known & given.keys()})
    except (TypeError, AttributeError, UsageError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of elastic.trainer: it does not say what its model is"
        ) from error


def check_weights(identity: object, config: GPTConfig, path: str) -> None:
    """Raises `UsageError`, which names the setting, where a checkpoint's weights are none of such a model.

    However it is written, and whatever only training depends on: dropout, the length of samples.
    """
    theirs, mine = _decisive(config_of(identity, path)), _decisive(config)
    for name, wanted in mine.items():
        if theirs[name] != wanted:
            raise UsageError(
                f"{path} is of a model with {name} {theirs[name]}, not {wanted}: give the same"
            )


def _decisive(config: GPTConfig) -> dict[str, Any]:
    """What tensors there are, and what is computed of them, with no default left open."""
    free = {"seq_length", "hidden_dropout", "attention_dropout"}
    learned, turned = config.position == "learned", config.position == "rope"
    return {name: value for name, value in asdict(config).items() if name not in free} | {
        "ffn_hidden_size": config.mlp_width, "num_query_groups": config.groups,
        "kv_channels": config.head_width, "qkv_bias": config.bias or config.qkv_bias,
        "max_positions": config.positions if learned else None,
        "rotary_base": config.rotary_base if turned else None,
        "rotary_percent": config.rotary_percent if turned else None,
    }  # fmt: skip


def opened(path: str, step: int | None = None) -> Weights:
    """The model of the newest step in a folder or at a URL, or that of `step`.

    Newer ones that are damaged are logged. Raises `NotFound` without one, `CheckpointError` where it is
    damaged or another program's.
    """
    where = canonical(path)
    found = inspection.pick(connect(where), step)
    for complaint in found.passed_over:
        log.error("%s", complaint)
    reader = stored.Stored(where, found.step)
    values: dict[str, Any] = {"identity": None}
    if reader.has("identity"):
        reader.load(values)
    return Weights(
        config=config_of(values["identity"], path),
        tensor=lambda name: reader.tensor(f"model.{name}"),
        step=found.step,
    )


def load_model(
    weights: Weights, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> GPT:
    """The model itself, in evaluation. dtype: None for that of the first tensor.

    Takes the model's memory on `device`, and one tensor's on the CPU.
    """
    with torch.device("meta"):
        model = GPT(weights.config)
    tensors: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():  # what is tied is among them once
        tensor = weights.tensor(name)
        if tensor.shape != parameter.shape:
            raise CheckpointError(
                f"{name} has the shape {list(tensor.shape)}, and {list(parameter.shape)} by what the "
                "checkpoint says of its model"
            )
        dtype = dtype or tensor.dtype
        tensors[name] = torch.nn.Parameter(tensor.to(device, dtype), requires_grad=False)
    if weights.config.tied:
        tensors["head.weight"] = tensors["embedding.words.weight"]
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False).eval()


def save_model(path: str, weights: Weights, *, step: int) -> None:
    """Make a step of a model alone, in fp32 as the trainer keeps it: `--finetune` starts from it.

    Takes one tensor's memory. Raises `CheckpointError` where there is that step already, OSError.
    """
    model = GPT(weights.config)  # of memory that is never touched
    tensors = {
        f"model.{name}": partial(_single, weights, name) for name, _ in model.named_parameters()
    }
    state = {"identity": identity_of(weights.config), "model": model}
    stored.save(path, state, step=step, tensors=tensors)


def _single(weights: Weights, name: str) -> Tensor:
    return weights.tensor(name).float()

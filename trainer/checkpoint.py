"""The plainest checkpoint that is safe: one safetensors file a step, written by rank 0.

A placeholder: `elastic.checkpoint` replaces this module in the next issue, with saves to memory,
sharded state and restore from peers.

`DIR/step-00000020.safetensors` is the state after 20 finished steps: `model.NAME` for each
parameter, `optimizer.NAME.KEY` for each of AdamW's tensors, and the run's identity as metadata.
DIR must be one directory to all nodes.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from elastic.trainer.files import DRAFT_SUFFIX, replace_atomically

Identity = Mapping[str, str | int | float]
"""What a run must be again for its checkpoints to fit: model shape, seed, batch, corpus."""

KEPT = 2
_NAME = re.compile(r"step-(\d{8})\.safetensors")


def path_of(directory: Path, step: int) -> Path:
    """Where the state after `step` steps lies."""
    return directory / f"step-{step:08d}.safetensors"


def save(
    directory: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Identity,
) -> Path:
    """Write the state after `step` steps, durably, then remove all but the newest `KEPT`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in _tensors(model, optimizer).items()}
    with replace_atomically(path_of(directory, step)) as draft:
        save_file(tensors, draft, metadata={"identity": json.dumps(dict(identity))})
    for old in _steps(directory)[KEPT:]:
        path_of(directory, old).unlink(missing_ok=True)
    for rubbish in directory.glob(f".step-*{DRAFT_SUFFIX}"):  # of a rank 0 that was killed
        rubbish.unlink(missing_ok=True)
    return path_of(directory, step)


def newest(directory: Path) -> int | None:
    """Step of the newest whole checkpoint, or None. A damaged file is passed over."""
    return next((step for step in _steps(directory) if _is_whole(path_of(directory, step))), None)


def read_identity(directory: Path, step: int) -> Identity:
    """Identity of the run that wrote `step`. Raises FileNotFoundError when it is not there."""
    with safe_open(path_of(directory, step), framework="pt") as file:
        identity: Identity = json.loads(file.metadata()["identity"])
    return identity


def load(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Put the state after `step` steps into `model` and, where given, `optimizer`.

    Raises FileNotFoundError when this node does not see the file, and KeyError or RuntimeError
    when the model is not the one that was saved.
    """
    with safe_open(path_of(directory, step), framework="pt") as file:
        names = file.keys()
        state = {name: file.get_tensor(name) for name in names if name.startswith("model.")}
        model.load_state_dict({name.removeprefix("model."): t for name, t in state.items()})
        if optimizer is None:
            return
        for name, parameter in model.named_parameters():
            prefix = f"optimizer.{name}."
            optimizer.state[parameter] = {
                key.removeprefix(prefix): file.get_tensor(key).to(parameter.device)
                for key in names
                if key.startswith(prefix)
            }


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _steps(directory: Path) -> list[int]:
    """Steps whose file has its final name, newest first."""
    if not directory.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _is_whole(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):  # checks the header against the file's length
            return True
    except (SafetensorError, FileNotFoundError):
        return False

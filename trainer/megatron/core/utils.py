"""Odds and ends."""

from typing import Any, Self, TypeVar

from torch import nn

from elastic.trainer.megatron import absent

__getattr__ = absent.attributes(__name__)

Values = TypeVar("Values")


class StragglerDetector:
    """Without effect: `elastic-run` finds slow ranks by itself. `with detector(bdata=True): ...`"""

    def __call__(self, bdata: bool = False) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def get_attr_wrapped_model(
    model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """An attribute of the model, which nothing is wrapped around; or the model, if it has that."""
    found = getattr(model, attr)
    return model if return_model_obj else found


def unwrap_model(model: Any, module_instances: object = None) -> Any:
    """The model itself: nothing is wrapped around it."""
    return model


def get_batch_on_this_cp_rank(batch: dict[str, Values], cp_group: None = None) -> dict[str, Values]:
    """The whole batch: there is no context parallelism."""
    return batch

"""Restarts are `elastic-run`'s."""

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(
    pretrain: Callable[..., None],
) -> tuple[Callable[..., None], None]:
    """`pretrain`, which then takes the `store` that comes beside it, and no store."""

    def started(*given: Any, store: None = None, **named: Any) -> None:
        pretrain(*given, **named)

    return started, None

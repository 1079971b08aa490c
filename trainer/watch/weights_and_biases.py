"""Weights & Biases, where the package is installed: Megatron's names, by iteration."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)


class WandbRun:
    """One run there, which every life of ours goes on with; on one rank only.

    W&B takes no step twice, so those that are run again are not doubled, and their first values stay.
    """

    def __init__(
        self, *, project: str, name: str, entity: str = "", folder: str = "", of: str = ""
    ) -> None:
        """of: what tells this run from others of its name, such as where its checkpoints are.

        Without the package it says so in one line, and then does nothing.
        """
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            log.warning("--wandb-project %s has no effect: pip install wandb", project)
            self._run: Any = None
            return
        told = f"{entity}\n{project}\n{name}\n{of}"
        self._run = wandb.init(
            project=project,
            name=name,
            entity=entity or None,
            dir=folder or None,
            id=hashlib.sha256(told.encode()).hexdigest()[:16],
            resume="allow",
        )

    def add(self, values: Mapping[str, float], iteration: int, consumed: int | None = None) -> None:
        """One point for each name, and the samples that go with the step."""
        if self._run is not None:
            more = {} if consumed is None else {"samples vs steps": consumed}
            self._run.log({**values, **more}, step=iteration)

    def back(self, iteration: int, consumed: int) -> None:
        """Nothing: see above."""

    def flush(self) -> None:
        """Nothing: its own process has it."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()

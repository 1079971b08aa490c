"""Weights & Biases, where the package is installed: Megatron's names, by iteration."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


class WandbRun:
    """One run there, which every life of ours goes on with; on one rank only. What fails there ends no training: no
    more goes there until the next start.

    W&B takes no step twice, so those that are run again are not doubled, and their first values stay.
    """

    def __init__(
        self,
        *,
        project: str,
        name: str,
        entity: str = "",
        folder: str = "",
        of: str = "",
        arguments: Mapping[str, Any],
    ) -> None:
        """of: what tells this run from others of its name, such as where its checkpoints are; arguments: the
        run's, its `config` there.

        Without the package it says so in one line, and then does nothing.
        """
        self._project = project
        self._run: Any = None
        try:
            import wandb  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            log.warning("--wandb-project %s has no effect: pip install wandb", project)
            return
        told = f"{entity}\n{project}\n{name}\n{of}"
        with self._until_it_fails(
            "; is there a login (wandb login), or is WANDB_MODE=offline meant?"
        ):
            self._run = wandb.init(
                project=project,
                name=name,
                entity=entity or None,
                dir=folder or None,
                id=hashlib.sha256(told.encode()).hexdigest()[:16],
                resume="allow",
                config={key: _plain(value) for key, value in arguments.items()},
                allow_val_change=True,  # a later life has another world, say
            )

    def add(self, values: Mapping[str, float], iteration: int, consumed: int | None = None) -> None:
        """One point for each name, and the samples that go with the step."""
        if self._run is not None:
            more = {} if consumed is None else {"samples vs steps": consumed}
            with self._until_it_fails():
                self._run.log({**values, **more}, step=iteration)

    def back(self, iteration: int, consumed: int) -> None:
        """Nothing: see above."""

    def flush(self) -> None:
        """Nothing: its own process has it."""

    def close(self) -> None:
        if self._run is not None:
            with self._until_it_fails():
                self._run.finish()

    @contextmanager
    def _until_it_fails(self, advice: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a package that is no dependency raises what it likes
            self._run = None
            said = " ".join(str(error).split()) or type(error).__name__
            log.warning(
                "--wandb-project %s has no effect from here on: %s%s", self._project, said, advice
            )


def _plain(value: Any) -> Any:
    """What JSON has a word for; the rest as text."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)

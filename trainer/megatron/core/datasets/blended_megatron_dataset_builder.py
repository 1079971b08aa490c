"""The datasets of a run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from elastic.proto.errors import UsageError
from elastic.trainer.data.gpt_dataset import datasets
from elastic.trainer.data.splits import Splits
from elastic.trainer.megatron import absent
from elastic.trainer.megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    MockGPTDataset,
)

__getattr__ = absent.attributes(__name__)


class BlendedMegatronDatasetBuilder:
    """Makes them of what a `GPTDatasetConfig` says."""

    def __init__(
        self, cls: type, sizes: Sequence[int | None], *rest: Any, config: Any = None
    ) -> None:
        """rest: on which ranks, which does not matter here, and the configuration, where it has no name."""
        self._config: GPTDatasetConfig = config or rest[-1]
        if cls not in (GPTDataset, MockGPTDataset):
            raise UsageError(
                f"BlendedMegatronDatasetBuilder makes GPTDataset and MockGPTDataset, not {cls.__name__}: "
                "return datasets of your own from the function that pretrain() is given"
            )
        self._mock, self._sizes = cls is MockGPTDataset, Splits(*sizes)

    def build(self) -> tuple[Any, Any, Any]:
        """Train, validation and test; None for what there is not. All ranks call it."""
        flags = self._config.flags
        if self._mock and not flags.mock_data:
            flags = replace(
                flags, mock_data=True, data_path=(), train_data_path=(), valid_data_path=(),
                test_data_path=(),
            )  # fmt: skip
        return datasets(flags, self._config.tokenizer, self._sizes)

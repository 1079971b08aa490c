"""What cannot be laid out together is refused in one line that says what to take."""

from typing import Any

import pytest

from elastic.proto.errors import UsageError
from elastic.trainer.model.recompute import Recompute
from elastic.trainer.parallel.layout import Layout

FULL = Recompute(granularity="full")


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        ({"virtual": 2}, "take interleaved, or one"),
        ({"sequence": True}, "tensor-model-parallel-size above 1"),
        ({"pp": 2, "zero": 2}, "take 0 or 1"),
        ({"schedule": "zero-bubble", "compile": True}, "take interleaved"),
        ({"schedule": "zero-bubble", "recompute": FULL}, "granularity selective, or interleaved"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        Layout(**asked)

"""What every test shares."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.e2e.harness.freezer import Freezer
from tests.e2e.harness.freezer import freezer as make_freezer

# No deadline for one example: two workers share two cores, and a slow moment is no failure.
settings.register_profile("elastic", deadline=None)
settings.load_profile("elastic")


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Freezer]:
    with make_freezer(f"elastic-{tmp_path.parent.name}-{tmp_path.name}") as made:
        yield made

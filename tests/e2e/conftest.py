"""A job for each test, ended whatever becomes of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()

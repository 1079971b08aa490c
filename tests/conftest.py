"""What every test shares."""

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.e2e.harness.freezer import Freezer
from tests.e2e.harness.freezer import freezer as make_freezer

# No deadline for one example: two workers share two cores, and a slow moment is no failure.
# Nor the profile for CI, which tries the same examples each time.
settings.register_profile("elastic", settings.get_profile("default"), deadline=None)
settings.load_profile("elastic")


def pytest_collection() -> None:
    """All that is imported stays: to look for garbage meanwhile takes a quarter of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Looking at it again in each collection takes 0.3 s."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Freezer]:
    with make_freezer(f"elastic-{tmp_path.parent.name}-{tmp_path.name}") as made:
        yield made


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """A server that speaks S3, a process of its own; its driver's options."""
    with serve_s3() as (options, _):
        yield options


@contextlib.contextmanager
def serve_s3() -> Iterator[tuple[str, int]]:
    """The options of its driver, and its pid."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        endpoint = server.stdout.readline().strip()
        assert endpoint, "moto did not start"
        options = {"key": "k", "secret": "tell-nobody", "endpoint_url": endpoint}
        yield json.dumps(options), server.pid
    finally:
        server.communicate()  # it ends with its standard input


_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
server.stop()
"""

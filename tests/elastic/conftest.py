"""`elasticctl` in the process of the tests."""

from pathlib import Path

import pytest

from elastic import ctl
from tests.elastic.asking import Answer, Ask


@pytest.fixture
def ask(capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run `elasticctl` in this process."""
    monkeypatch.setenv("GRPC_VERBOSITY", "NONE")
    monkeypatch.delenv("ELASTIC_JOB_TOKEN", raising=False)

    def run(*args: str | Path) -> Answer:
        capfdbinary.readouterr()
        try:
            code = ctl.main([str(arg) for arg in args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capfdbinary.readouterr()
        return Answer(code=code, out=said.out.decode(), err=said.err.decode())

    return run

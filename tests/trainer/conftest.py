import pytest


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than a machine has GPUs, and the same bits on any machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

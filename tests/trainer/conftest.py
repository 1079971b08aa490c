import pytest
import torch

torch.set_num_threads(1)
"""Of a worker: on cores that workers and their ranks share, a pool's threads wait for one another."""


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than a machine has GPUs, and the same bits on any machine."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

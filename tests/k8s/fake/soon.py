"""Pauses that a test can wait for, of whoever writes to the fake server and watches it, and how that refuses."""

import pytest

from elastic.k8s.kernel import reflector, writes

REFUSALS = {"no answer": 0, "conflict": 409, "too many": 429, "broken": 500, "busy": 503}
"""By name: a status; 0: the connection is cut."""


def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of the test."""
    monkeypatch.setattr(writes, "FIRST", 0.001)
    monkeypatch.setattr(writes, "MOST", 0.01)
    monkeypatch.setattr(writes, "EXPECTED", 10.0)
    monkeypatch.setattr(reflector, "PAUSE", 0.01)
    monkeypatch.setattr(reflector, "LONG_PAUSE", 0.05)

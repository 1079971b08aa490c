"""Signals in words."""

import signal


def name(number: int) -> str:
    """Most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Timings of elastic-run beside its peers, taken in the same run on the same machine."""

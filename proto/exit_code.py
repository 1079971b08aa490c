"""Exit codes that mean something between our own processes."""

CRASHED = 70
"""Of an agent or a master that met a bug (EX_SOFTWARE): the guardian starts it again, as if killed."""

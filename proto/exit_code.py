"""Exit codes that mean something between our own processes."""

MASTER_LOST = 210
"""Of an agent that no master answered, where exit codes are detailed (`proto/ending.py`)."""

CRASHED = 70
"""Of an agent or a master that met a bug (EX_SOFTWARE): the guardian starts it again, as if killed."""

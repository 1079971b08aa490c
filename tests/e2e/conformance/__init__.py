"""One corpus of command lines, run under torchrun and under elastic-run, and compared."""

"""Where datasets were until 2023."""

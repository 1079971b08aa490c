"""elastic-keeper on a machine that has as much memory for snapshots as the file $AVAILABLE says."""

import os
from pathlib import Path

from elastic.agent.snapshots import memory
from elastic.checkpoint.keeper import process


def main(args: list[str]) -> None:
    memory.available = lambda *_: int(Path(os.environ["AVAILABLE"]).read_text())
    process.main(args)

"""What becomes of the guardian's children. What a whole launcher makes of it is in tests/e2e."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENDING = """
import logging, os, signal, sys
from elastic.agent.guardian import Guardian
from elastic.agent.snapshots.vault import Vault

logging.basicConfig(level=logging.WARNING)
ready, tell = os.pipe()

def master():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as an interpreter that is about to end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    os.write(tell, b".")
    while True:
        signal.pause()

def agent():
    os.read(ready, 1)
    return 1

sys.exit(Guardian(agent, master, Vault()).run((signal.SIGTERM,)))
"""


def test_a_master_that_was_told_to_end_and_ended_by_that_is_not_started_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")

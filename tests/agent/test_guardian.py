"""What becomes of the guardian's children. What a whole launcher makes of it is in tests/e2e."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENDING = """
import logging, os, signal, sys
from elastic.agent.guardian import Guardian
from elastic.agent.pulse import Pulse
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

sys.exit(Guardian(agent, master, Vault(), Pulse(5.0)).run((signal.SIGTERM,)))
"""


HANGING = """
import logging, os, signal, sys
from elastic.agent.guardian import Guardian
from elastic.agent.pulse import Pulse
from elastic.agent.snapshots.vault import Vault

logging.basicConfig(level=logging.WARNING, format="%(message)s")
pulse = Pulse(0.01)
pulse.most = 2.0
lives, life = os.pipe()
ready, tell = os.pipe()
os.write(life, b"12")

def master():
    number = os.read(lives, 1)
    pulse.beat()
    while number == b"1":  # as an event loop that never comes back
        signal.pause()
    os.write(tell, b".")
    return 0

def agent():
    os.read(ready, 1)
    return 0

sys.exit(Guardian(agent, master, Vault(), pulse).run(()))
"""


def test_a_master_whose_loop_is_dead_is_killed_and_started_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    first, second = done.stderr.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(
        r"the master has done nothing for 2 s, though its process \d+ is there \(state S[^)]*\): it is killed",
        first,
    )
    assert second == "the master died (signal 9) and is started again"


def test_a_master_that_was_told_to_end_and_ended_by_that_is_not_started_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")

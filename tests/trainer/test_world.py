import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

LEAVES = """
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
from elastic.trainer.world import joined

with joined():
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    torch.autograd.backward(model(torch.ones(3)).sum())
    del model
print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")), sep="\\n")
"""


def test_no_thread_of_the_group_outlives_it() -> None:
    """One that does may abort the process at its exit, on a machine that is busy."""
    command = [sys.executable, "-c", LEAVES]
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=150
    )
    threads = done.stdout.split()
    assert threads
    assert not [name for name in threads if "gloo" in name], threads

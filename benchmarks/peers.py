"""The launchers that are compared, and the venv that DLRover needs for itself.

`python -m benchmarks.peers` makes the venv. DLRover 0.6.1 imports `grpc`, `kubernetes`, `google.protobuf` and
`pydantic`
without asking for them, and its own requirements would choose another torch.
"""

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.jobs import Launcher

DLROVER_VENV = Path.home() / ".cache" / "elastic" / "benchmarks" / "dlrover"
SHIM = Path(__file__).parent / "dlrover_shim.py"
TORCH = "torch==2.13.0"
DLROVER = ("dlrover==0.6.1", "grpcio", "kubernetes", "protobuf", "pydantic")

OURS = Launcher(name="elastic-run", prefix=(sys.executable, "-m", "elastic.run"))
TORCHRUN = Launcher(name="torchrun", prefix=(sys.executable, "-m", "torch.distributed.run"))
TORCHRUN_OWN_STORE = Launcher(
    name="torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
    prefix=TORCHRUN.prefix,
    env=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
)


def dlrover(python: Path) -> Launcher:
    """DLRover's launcher under the interpreter of its venv."""
    return Launcher(name="DLRover 0.6.1", prefix=(str(python), str(SHIM)))


def make_venv(folder: Path = DLROVER_VENV) -> Path:
    """Make DLRover's venv unless it is there; its interpreter."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        for packages in ((TORCH, "numpy"), DLROVER):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


if __name__ == "__main__":
    sys.stdout.write(f"{make_venv()}\n")

"""The launchers that are compared."""

from .runner import Launcher

TORCHRUN = Launcher(name="torchrun", package="torch.distributed")
TORCHRUN_WARM = Launcher(name="torchrun", package="torch.distributed", warm="")
ELASTIC_SPAWNED = Launcher(
    name="elastic-run, spawned", package="elastic", flags=("--rank-start", "spawn")
)
ELASTIC_FORKED = Launcher(name="elastic-run, forked", package="elastic", warm="elastic-standby")

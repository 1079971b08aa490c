"""The launchers that are compared. Each is a command prefix."""

import sys

from .runner import Launcher

TORCHRUN = Launcher(name="torchrun", prefix=(sys.executable, "-m", "torch.distributed.run"))
TORCHRUN_WARM = Launcher(name="torchrun", prefix=TORCHRUN.prefix, warm="")
ELASTIC_SPAWNED = Launcher(
    name="elastic-run, spawned",
    prefix=(sys.executable, "-m", "elastic.run", "--rank-start", "spawn"),
)
ELASTIC_FORKED = Launcher(
    name="elastic-run, forked", prefix=(sys.executable, "-m", "elastic.run"), warm="elastic-standby"
)

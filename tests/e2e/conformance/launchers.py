"""The launchers that are compared. Each is a command prefix."""

import os
import sys

from .runner import Launcher

# Seconds in which a standby is ready, on two cores; more where they are busy.
WARM_S = float(os.environ.get("CONFORMANCE_WARM_S", "8"))

TORCHRUN = Launcher(name="torchrun", prefix=(sys.executable, "-m", "torch.distributed.run"))
TORCHRUN_WARM = Launcher(name="torchrun", prefix=TORCHRUN.prefix, warm=0.2)
ELASTIC_SPAWNED = Launcher(
    name="elastic-run, spawned",
    prefix=(sys.executable, "-m", "elastic.run", "--rank-start", "spawn"),
)
ELASTIC_FORKED = Launcher(
    name="elastic-run, forked", prefix=(sys.executable, "-m", "elastic.run"), warm=WARM_S
)

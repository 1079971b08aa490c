"""Rank 1 takes one of torch's countdown timers and does not give it back in time."""

import os
import sys
import time

import probe
from torch.distributed.elastic.timer import api
from torch.distributed.elastic.timer.file_based_local_timer import FileTimerClient


def main() -> None:
    probe.warm_up()
    probe.write("pid", os.getpid())
    api.configure(FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with api.expires(after=60, scope="in time"):
        probe.all_have_spoken()
    if os.environ["RANK"] == "1":
        with api.expires(after=1, scope="too long"):
            time.sleep(4)
            sys.stdout.write("@@ alive three seconds after\n")
    time.sleep(20)


if __name__ == "__main__":
    main()

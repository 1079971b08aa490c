"""Notes the moment a new rank runs its first line, then waits. Imports neither torch nor ours."""

import os
import time

now = time.monotonic()
fields = (
    "start",
    repr(now),
    os.environ.get("BENCH_NODE", "0"),
    os.environ["RANK"],
    os.getpid(),
    os.environ["WORLD_SIZE"],
    -1,
)
path = os.path.join(os.environ["BENCH_OUT"], "events")
fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
os.write(fd, (" ".join(map(str, fields)) + "\n").encode())
time.sleep(float(os.environ.get("BENCH_STAY", "600")))

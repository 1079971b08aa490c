"""`python -m tests.agent.logs.logs_program FOLDER ROUNDS LINES`: rounds of one rank with teed files.

As an agent has them; notes in FOLDER/result.json what they cost.
"""

import asyncio
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from elastic.agent.logs import tee
from elastic.agent.logs.logs import AttemptLogs
from elastic.agent.settings import LogSettings


async def play(folder: Path, rounds: int, lines: int) -> None:
    settings = LogSettings(run_dir=folder / "logs", tee=3)
    # The loop's own pool starts another thread whenever its first is not idle yet: one is all it gets.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    closing, threads, files = [], [], []
    for number in range(1, rounds + 1):
        logs = AttemptLogs(settings, number, "role")
        streams = logs.open(0, 0)
        logs.follow()
        for name, fd in (("out", streams.stdout), ("err", streams.stderr)):
            for line in range(lines):
                os.write(fd, f"{name} {number} {line}\n".encode())
            os.close(fd)
        began = time.monotonic()
        await logs.close()
        closing.append(time.monotonic() - began)
        threads.append(threading.active_count())
        files.append(len(os.listdir("/proc/self/fd")))
    began = time.monotonic()
    tee.finish()
    result = {
        "closing": closing,
        "threads": threads,
        "files": files,
        "finish": time.monotonic() - began,
    }
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))

"""`python -m elastic.agent.starters.spawner FD`: starts processes by fork and exec.

No torch, one thread. It exists because the agent has threads (grpc's), beside which nothing may run between fork and exec.
"""

import os
import sys
from typing import NoReturn

from elastic.agent import boot
from elastic.agent.starters import fork
from elastic.agent.starters.spec import StartSpec


def main(args: list[str]) -> None:
    """Serve the starter protocol on the descriptor `args[0]` until the agent closes its end."""
    channel = fork.open_channel(int(args[0]))
    channel.send({"ready": True, "seconds": 0.0, "threads": 1})
    while (received := fork.receive(channel)) is not None:
        message, fds = received
        if "start" in message:
            request = fork.start(channel, message, fds)
            if request is not None:
                _execute(request, fork.prepare(request))


def _execute(request: fork.Request, environ: dict[str, str]) -> NoReturn:
    command = _command(request.spec, request.fds)
    try:
        os.execvpe(command[0], command, environ)
    except FileNotFoundError as error:
        fork.give_up(f"cannot start {command[0]}: {error.strerror}", 127)
    except OSError as error:
        fork.give_up(f"cannot start {command[0]}: {error.strerror}", 126)


def _command(spec: StartSpec, fds: dict[str, int]) -> list[str]:
    if spec.kind != "store":
        return spec.command()
    for fd in fds.values():
        os.set_inheritable(fd, True)
    numbers = [str(fds[name]) for name in ("listen", "link") if name in fds]
    return boot.command(spec.python, "elastic.agent.store", *numbers)


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m elastic.agent.store LISTEN [READY]`: the TCPStore of one round, and nothing else.

The socket was bound by the agent, so no port can be lost between choosing and using it, and clients
may connect before this process runs. It ends with the agent, or when the agent kills it.
"""

import contextlib
import gc
import os
import signal
import socket
import sys
from datetime import timedelta

from elastic.agent.prctl import set_pdeathsig
from elastic.agent.starters import fork
from elastic.proto import env

TIMEOUT = timedelta(seconds=60)
_PROOF = "elastic/proof"


def main(args: list[str]) -> None:
    """Serve on the listening socket `args[0]`; say "ready" on the descriptor `args[1]`, if any."""
    agent = os.getppid()
    set_pdeathsig()
    if os.getppid() != agent:
        return
    serve(int(args[0]), int(args[1]) if len(args) > 1 else None)


def serve(listen: int, ready: int | None) -> None:
    """Start the store, prove it with a set and a get, say so, and stay. Never returns."""
    from setproctitle import setproctitle

    gc.disable()  # what is imported stays
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = _address(listen)
    setproctitle(f"elastic-store {host}:{port}")
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        multi_tenant=False,
        master_listen_fd=listen,
    )
    store.set(_PROOF, "1")
    if store.get(_PROOF) != b"1":
        raise SystemExit("elastic: the store does not give back what was set")
    store.delete_key(_PROOF)
    if ready is not None:
        with contextlib.suppress(OSError):
            os.write(ready, b"ready\n")
        os.close(ready)
    while True:
        signal.pause()


def become(request: fork.Request) -> None:
    """In a fork of a process that has torch imported: be the store that was asked for."""
    environ = fork.prepare(request)
    variables = env.process_environment()
    variables.clear()
    variables.update(environ)
    serve(request.fds["listen"], request.fds.get("link"))


def _address(listen: int) -> tuple[str, int]:
    """Where this process itself reaches the socket; `listen` stays the caller's."""
    with socket.socket(fileno=os.dup(listen)) as bound:
        host, port = bound.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "localhost"}.get(host, host), port


if __name__ == "__main__":
    main(sys.argv[1:])

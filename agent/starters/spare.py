"""A spare rank: forked ahead of its round, holds a device context, waits for its orders."""

import contextlib
import gc
import importlib
import os
import select
import socket
from collections.abc import Callable, Iterable
from typing import Any

from setproctitle import setproctitle

from elastic.agent.starters import fork, warmup
from elastic.agent.starters.spec import StartSpec
from elastic.proto import descriptors, env

READY, TAKEN = b"ready", b"taken"
FAILED = b"failed: "
"""From it, with the reason: the device could not be warmed up."""
UNREHEARSED = b"not rehearsed: "
"""From it, with the reason; it is ready all the same."""
SLOTS = b"slots"
"""To the spare: its rank's slots, all of them, as descriptors. From it: it has registered them."""
MOST_FDS = 64
"""That come with a message."""


def wait(request: fork.Request, modules: Iterable[str]) -> fork.Request:
    """Warm the device up, say so, and return with the orders, once they come.

    modules: what a rank imports and no process that is forked again may (`preload.py`).
    """
    variables = env.process_environment()
    variables.clear()
    variables.update(request.spec.environ)
    for name in (env.PAGE_FD, env.LINK_FD):
        variables.pop(name, None)  # of a rank that is another process
    device = request.spec.target
    setproctitle(f"elastic-spare {device}: warming up")
    orders = socket.socket(fileno=request.fds["orders"])
    try:
        warmup.device(device)
    except RuntimeError as error:  # the ranks may have taken its memory meanwhile
        orders.send(FAILED + str(error).partition("\n")[0].encode()[:500])
        os._exit(1)
    for module in modules:
        with contextlib.suppress(Exception):  # the script meets it, too, and says so
            importlib.import_module(module)
    try:
        warmup.compiler(device)
        if why := warmup.rehearsal(request.spec):
            orders.send(UNREHEARSED + why.encode(errors="replace")[:500])
        gc.freeze()  # modules and graphs: the rank need not look through them for garbage as it begins
        setproctitle(f"elastic-spare {device}")
        orders.send(READY)
    except OSError:
        os._exit(0)  # given up meanwhile
    data, fds = prepare(
        orders,
        lambda: _ahead(device),
        lambda what: setproctitle(f"elastic-spare {device}: {what}"),
    )
    if not data:
        os._exit(0)  # given up
    orders.send(TAKEN)
    orders.close()
    spec = StartSpec.from_json(fork.read_memory(fds[0]))
    os.close(fds[0])
    names = data.decode().split(",")
    return fork.Request(id=request.id, spec=spec, fds=dict(zip(names, fds[1:], strict=True)))


def _ahead(device: str) -> Any:
    """By name, since the agent's folder imports no torch."""
    return importlib.import_module("elastic.checkpoint.save.ahead").begin(device)


def prepare(
    orders: socket.socket, begin: Callable[[], Any], tell: Callable[[str], None]
) -> tuple[bytes, list[int]]:
    """Register the slots that are shown until other orders come; returns these. begin: makes `save.ahead.Ahead`, once one
    is shown; tell: of what it is at."""
    ahead: Any = None
    news = select.poll()
    news.register(orders, select.POLLIN)
    while True:
        data, fds = descriptors.receive(orders, fork.DATAGRAM, MOST_FDS)
        if data != SLOTS:
            return data, fds
        if ahead is None:
            ahead = begin()
        tell("registering slots")
        ahead.show(fds)
        # Orders end the pause, too: where the driver was busy with a killed rank it would be seconds.
        while more := ahead.go_on(lambda seconds: news.poll(1e3 * seconds)):
            if news.poll(0):
                break
        if not more:
            tell("slots registered")
            orders.send(SLOTS)

"""The sockets that a launcher holds for its whole life."""

import errno
import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from elastic.addresses import Address, is_numeric, means_loopback
from elastic.agent.ports import listen
from elastic.options import Options
from elastic.proto.errors import UsageError

log = logging.getLogger("elastic")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The master's port, held for the guardian's life."""

    holder: socket.socket
    """Bound and never listening; only children of ours can bind the port beside it."""
    claim: socket.socket | None
    """A name that one launcher of a host can have: that one hosts the master."""
    everywhere: bool
    """On every address of this node, and not on the endpoint's alone."""

    @property
    def port(self) -> int:
        port: int = self.holder.getsockname()[1]
        return port

    def listen_address(self, endpoint: str) -> str:
        """host:port for the master to listen on; `endpoint`: where others find it."""
        host, port = self.holder.getsockname()[:2]
        return join(host, port) if self.everywhere else endpoint


def reserve(options: Options, found: list[Address]) -> Reservation | None:
    """Become the launcher that hosts the master; None: this node joins another's.

    found: the endpoint's addresses. The port alone would not do as the election: connections of a
    job that was drained a moment ago keep it from being bound exclusively for a minute, and two
    sockets that do not mind them do not mind one another. Opened to children afterwards, so that a
    master that died finds it still free.
    """
    if options.hosts_master is False:
        return None
    must = options.hosts_master or options.max_nodes == 1
    at = _listening(options, found)
    if at is None:
        if must:
            raise _cannot_listen(options, errno.EADDRNOTAVAIL)
        return None
    claim, holder = None, socket.socket(at.family, socket.SOCK_STREAM)
    try:
        if options.endpoint_port:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            claim.bind(f"\0elastic-run {found[0].host} {options.endpoint_port}")
        must = True  # whoever else has the port is no launcher
        _bind(holder, at.sockaddr)
    except OSError as error:
        holder.close()
        if claim is not None:
            claim.close()
        if must:
            raise _cannot_listen(options, error.errno or 0) from error
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return Reservation(holder, claim, at == at.everywhere)


def _listening(options: Options, found: list[Address]) -> Address | None:
    """What the master listens on; None: the endpoint is another node's.

    What was typed as a number is meant. A name may mean another address elsewhere: many a system
    has its own at 127.0.1.1, and NAT or a service may stand before the node that is to be the host.
    """
    mine = next((address for address in found if address.is_local), None)
    if mine is None:
        if not options.hosts_master:
            return None
        log.warning(
            "%s is no address of this node: the master listens on every one, and is found only "
            "where that address leads here",
            options.endpoint_host,
        )
        return found[0].everywhere
    literal = is_numeric(options.endpoint_host) or means_loopback(options.endpoint_host)
    if options.max_nodes == 1 or literal:
        return mine
    return mine.everywhere if options.hosts_master or mine.loopback else mine


def _bind(holder: socket.socket, address: tuple[Any, ...]) -> None:
    """Exclusively; beside connections that linger where there are some. Raises OSError."""
    try:
        holder.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)  # still refused where somebody listens


def _cannot_listen(options: Options, number: int) -> UsageError:
    hints = {
        errno.EADDRINUSE: "another program, or this job itself, has the port; choose another one",
        errno.EADDRNOTAVAIL: "that is no address of this node",
        errno.EACCES: "ports below 1024 are root's; choose another one",
    }
    hint = hints.get(number, os.strerror(number))
    return UsageError(f"cannot listen on {options.endpoint_host}:{options.endpoint_port}: {hint}")


def knock_socket(options: Options, host: str) -> socket.socket:
    low_high = options.port_range
    try:
        return listen(host, range(low_high[0], low_high[1] + 1) if low_high else None)
    except OSError as error:
        raise UsageError(
            f"cannot listen on this node: {error}; see --local-addr and --port-range"
        ) from error


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

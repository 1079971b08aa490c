"""The sockets that a launcher holds for its whole life, and the address at which others reach it."""

import errno
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any

from elastic.agent.ports import listen
from elastic.options import Options
from elastic.proto.errors import UsageError


@dataclass(frozen=True, slots=True)
class Reservation:
    """The master's port, held for the guardian's life."""

    holder: socket.socket
    """Bound and never listening; only children of ours can bind the port beside it."""
    claim: socket.socket | None
    """A name that one launcher of a host can have: that one hosts the master."""

    @property
    def port(self) -> int:
        port: int = self.holder.getsockname()[1]
        return port


def reserve(options: Options) -> Reservation | None:
    """Become the launcher that hosts the master; None: this node joins another's.

    The port alone would not do as the election: connections of a job that was drained a moment ago
    keep it from being bound exclusively for a minute, and two sockets that do not mind them do not
    mind one another. Opened to children afterwards, so that a master that died finds it still free.
    """
    if options.hosts_master is False:
        return None
    try:
        found = socket.getaddrinfo(
            options.endpoint_host, options.endpoint_port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        raise UsageError(
            f"cannot find the address of {options.endpoint_host}: {error.strerror}"
        ) from error
    family, _, _, _, address = found[0]
    claim: socket.socket | None = None
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if options.endpoint_port:
            claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            claim.bind(f"\0elastic-run {address[0]} {options.endpoint_port}")
        _bind(holder, address)
    except OSError as error:
        holder.close()
        if claim is not None:
            claim.close()
        _check_join(options, error)
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return Reservation(holder, claim)


def _bind(holder: socket.socket, address: tuple[Any, ...]) -> None:
    """Exclusively; beside connections that linger where there are some. Raises OSError."""
    try:
        holder.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)  # still refused where somebody listens


def _check_join(options: Options, error: OSError) -> None:
    """The address is another's; that is a mistake where this node must have it."""
    if options.hosts_master or (options.max_nodes == 1 and options.hosts_master is None):
        where = f"{options.endpoint_host}:{options.endpoint_port}"
        hints = {
            errno.EADDRINUSE: "another program, or this job itself, has the port; choose another one",
            errno.EADDRNOTAVAIL: "that is no address of this node",
            errno.EACCES: "ports below 1024 are root's; choose another one",
        }
        hint = hints.get(error.errno or 0, str(error.strerror))
        raise UsageError(f"cannot listen on {where}: {hint}") from error


def own_address(options: Options, host: str, port: int) -> str:
    """The address at which other nodes reach this one."""
    if options.local_addr:
        return options.local_addr
    if options.max_nodes == 1:
        return "127.0.0.1" if host in ("localhost", "0.0.0.0") else _numeric(host, port)
    target = _numeric(host, port)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # asks the routing table, sends nothing
        try:
            probe.connect((target, port or 9))
            return str(probe.getsockname()[0])
        except OSError:
            return target


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(_numeric(host, 0).partition("%")[0]).is_loopback
    except ValueError:  # a name that nobody knows
        return False


def _numeric(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


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

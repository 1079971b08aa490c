"""Listening sockets: bound here, handed to the process that serves them."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

BACKLOG = 16384
"""Clients that may connect before the store accepts one; the kernel cuts it to somaxconn."""

_ESTABLISHED = "01"


def listen(host: str, ports: range | None = None) -> socket.socket:
    """A TCP socket that listens on `host`, on the first free port of `ports` or on any.

    `host` is a name or an address, IPv4 or IPv6; "" is every address of both. Clients can connect
    at once, and wait until somebody accepts. The port is read with `getsockname()`, so nobody can
    take it in between. Raises OSError.
    """
    family, address = _resolve(host)
    failure: OSError | None = None
    for port in (0,) if ports is None else ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != ""))
            if port:  # a port whose last connections are in TIME_WAIT is free
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            failure = error
    raise OSError(f"no port to listen on at {host or 'any address'}, of {_words(ports)}: {failure}")


def connected(port: int, server: int) -> bool:
    """Whether anybody is connected to `port` here, but for the process `server`, which serves it.

    A TCPStore is a client of its own.
    """
    own = _sockets(server)
    clients, selves = set[str](), set[str]()
    for local, remote, inode in _established():
        if int(local, 16) == port:
            clients.add(remote)
        elif int(remote, 16) == port and inode in own:
            selves.add(local)
    return bool(clients - selves)


def _established() -> Iterator[tuple[str, str, str]]:
    """Local and remote port, in hexadecimal, and inode of every TCP connection of this host."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as table:
            for row in table:
                fields = row.split()
                if fields[3] == _ESTABLISHED:
                    yield fields[1].rpartition(":")[2], fields[2].rpartition(":")[2], fields[9]


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets of a process."""
    found = set[str]()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return found


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    if host == "":
        return (socket.AF_INET6, "::") if socket.has_ipv6 and _ipv6() else (socket.AF_INET, "")
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, str(address[0])


def _ipv6() -> bool:
    """Whether the kernel has IPv6 at all; containers often have it switched off."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _words(ports: range | None) -> str:
    return "any" if ports is None else f"{ports.start}-{ports.stop - 1}"

"""Listening sockets: bound here, handed to the process that serves them."""

import contextlib
import socket

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


def connected(port: int) -> bool:
    """Whether somebody is connected to what listens on `port` here."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as table:
            for line in table:
                _, local, _, state, *_ = line.split()
                if state == _ESTABLISHED and local.endswith(f":{port:04X}"):
                    return True
    return False


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

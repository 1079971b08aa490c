"""The addresses behind the endpoint's name, and the one at which other nodes reach this node."""

import contextlib
import ipaddress
import logging
import queue
import socket
import threading
from dataclasses import dataclass
from typing import Any

import psutil

from elastic.options import Options
from elastic.proto.errors import ElasticError, MasterUnreachable, UsageError

log = logging.getLogger("elastic")

QUIET = 5.0
"""Seconds that a name may take before anything is said."""
PAUSE = 0.5
"""Seconds between two look-ups of a name that is not there yet."""
OWN_NAME = 2.0
"""Seconds that a look-up of this node's own name may take."""
ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Of documentation, so nobody's; the way there is the way to everywhere."""
_NOT_YET = {
    getattr(socket, name)
    for name in ("EAI_AGAIN", "EAI_FAIL", "EAI_NODATA", "EAI_NONAME", "EAI_SYSTEM")
}
"""Failures of a look-up that another one may not meet: a pod's name comes with the pod."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a socket may be bound or connect to."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    """As the socket calls take it."""

    @property
    def host(self) -> str:
        return str(self.sockaddr[0])

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return _ip(self.host).is_loopback

    @property
    def everywhere(self) -> "Address":
        """The same port on every address of the family."""
        host = "::" if self.family == socket.AF_INET6 else "0.0.0.0"
        return Address(self.family, (host, *self.sockaddr[1:]))

    @property
    def is_local(self) -> bool:
        """Whether it is one of this node's."""
        try:
            with socket.socket(self.family, socket.SOCK_STREAM) as probe:
                probe.bind((self.host, 0, *self.sockaddr[2:]))
        except OSError:
            return False
        return True


def is_numeric(host: str) -> bool:
    """Whether it is an address as it stands, and no name."""
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def means_loopback(host: str) -> bool:
    """Whether it is loopback on every machine: a number, localhost or what ends in it (RFC 6761), and
    its old long form.
    """
    if is_numeric(host):
        return _ip(host).is_loopback
    name = host.lower().removesuffix(".").removesuffix(".localdomain")
    return name.split(".")[-1] == "localhost"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    found = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)  # 127.1 is one, too
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])


def look_up(host: str, port: int, patience: float) -> list[Address]:
    """The addresses of `host`, waited for for `patience` seconds where it has none yet.

    Raises UsageError for what can never be a name, MasterUnreachable when patience is over.
    """
    search = _Search(host, port)
    if is_numeric(host):
        return search.once()
    worker = threading.Thread(target=search.run, daemon=True)
    worker.start()  # so that a signal ends us though a name server does not answer
    try:
        found = search.outcome(min(QUIET, patience))
        if found is None and patience > QUIET:
            log.warning("waiting for the address of %s (%s)", host, search.trouble)
            found = search.outcome(patience - QUIET)
    finally:
        search.stop.set()
    if found is None:
        raise MasterUnreachable(
            f"no address for {host} within {patience:g} s ({search.trouble}): is the endpoint's "
            "name right?"
        )
    worker.join()  # what is forked from here on has one thread
    return found


class _Search:
    """A look-up that goes on until there is an address, in a thread that may be left behind."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._outcome: queue.SimpleQueue[list[Address] | UsageError] = queue.SimpleQueue()
        self.trouble = "no name server answers"
        self.stop = threading.Event()

    def outcome(self, timeout: float) -> list[Address] | None:
        """None: not within `timeout` seconds. Raises UsageError."""
        try:
            outcome = self._outcome.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(outcome, UsageError):
            raise outcome
        return outcome

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                self._outcome.put(self.once())
                return
            except UsageError as error:
                self._outcome.put(error)
                return
            except socket.gaierror as error:
                self.trouble = str(error.strerror)
                self.stop.wait(PAUSE)

    def once(self) -> list[Address]:
        """Raises UsageError for what can never be a name, socket.gaierror for what may be one."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            if isinstance(error, socket.gaierror) and error.errno in _NOT_YET:
                raise
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"cannot find the address of {self._host}: {why}") from error
        return [Address(family, address) for family, _, _, _, address in found]


def own_address(options: Options, found: list[Address]) -> str:
    """The address at which other nodes reach this one; `found`: the endpoint's."""
    if options.local_addr:
        return options.local_addr
    if options.max_nodes == 1 and (mine := [a for a in found if a.is_local]):
        anywhere = mine[0] == mine[0].everywhere
        named = means_loopback(options.endpoint_host) and not is_numeric(options.endpoint_host)
        return "127.0.0.1" if anywhere or named else mine[0].host
    source = _source(found[0].family, found[0].sockaddr) or found[0].host
    if not _ip(source).is_loopback or means_loopback(options.endpoint_host):
        return source
    return _reachable(found[0].family) or source  # this node's own name is loopback here


def _source(family: socket.AddressFamily, target: tuple[Any, ...]) -> str:
    """The address from which this node would send there; empty where there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # asks the routing table, sends nothing
        try:
            probe.connect((target[0], target[1] or 9, *target[2:]))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _reachable(family: socket.AddressFamily) -> str:
    """An address of this node that is not loopback: of its name, of its way out, of an interface."""
    found: list[Address] = []
    with contextlib.suppress(ElasticError):
        found = look_up(socket.gethostname(), 0, OWN_NAME)
    named = [a.host for a in found if a.family == family and a.is_local]
    interfaces = [
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == family
    ]
    for host in (*named, _source(family, (ELSEWHERE[family], 9)), *interfaces):
        if host and not (_ip(host).is_loopback or _ip(host).is_link_local):
            return host
    return ""

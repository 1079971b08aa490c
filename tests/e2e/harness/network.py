"""Hosts that are network namespaces: an own address, an own /dev/shm, and a cable to pull.

Every host hangs by a veth pair on a bridge, which lies in a namespace of its own: nothing of it is in
the network of the machine.
"""

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from .job import Job, Node


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@cache
def missing() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    name = f"e2e-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        run("ip", "netns", "del", name)
        run("unshare", "-m", "true")
    except OSError as error:
        return str(error)
    return ""


class Network:
    """`hosts` hosts, numbered from 0, with the addresses 10.77.0.1 and on."""

    def __init__(self, name: str, hosts: int) -> None:
        self._switch = f"{name}-s"
        self._names = [f"{name}-{number}" for number in range(hosts)]

    def __enter__(self) -> Self:
        try:
            self._make()
        except OSError:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for number, name in enumerate(self._names):
            port = f"port{number}"
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            peer = ("peer", "name", port, "netns", self._switch)
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", *peer)
            run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        for name in (*self._names, self._switch):
            subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number + 1}"

    def on(self, number: int) -> tuple[str, ...]:
        """What goes before a command that is to run on a host."""
        return ("ip", "netns", "exec", self._names[number])

    def pull(self, number: int) -> None:
        """Take a host's cable out: packets vanish, and nobody is told."""
        run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def part(self, number: int, other: int) -> None:
        """Nothing goes between these two any more; all others have both."""
        for one, away in ((number, other), (other, number)):
            run("ip", "-n", self._names[one], "route", "add", "blackhole", self.address(away))

    def limit(self, number: int, rate: str) -> None:
        """What goes to a host and comes from it, as tc writes it: 20mbit."""
        limit = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "100ms")
        run("tc", "-n", self._names[number], "qdisc", "add", "dev", "eth0", *limit)
        run("tc", "-n", self._switch, "qdisc", "add", "dev", f"port{number}", *limit)

    def plug(self, number: int) -> None:
        run("ip", "-n", self._switch, "link", "set", f"port{number}", "up")


def start(
    job: Job,
    network: Network,
    number: int,
    *flags: str,
    nodes: str,
    nproc: int = 1,
    script: str = "",
) -> Node:
    """Start a launcher on a host; the job's endpoint is on the first one."""
    job.address = network.address(0)
    return job.start(
        *flags,
        nodes=nodes,
        nproc=nproc,
        prefix=network.on(number),
        environ={"GLOO_SOCKET_IFNAME": "eth0"},
        script=tuple(script.split()),
    )


def with_resolver(folder: Path, server: str, names: str = "") -> tuple[str, ...]:
    """What goes before a command so that it asks `server` for names but for those given as lines of
    a file of hosts; nobody else is touched."""
    path = folder / "resolv.conf"
    path.write_text(f"nameserver {server}\n")
    hosts = folder / "hosts"
    hosts.write_text(f"{names}\n")
    bind = f'mount --bind {path} /etc/resolv.conf && mount --bind {hosts} /etc/hosts && exec "$@"'
    return ("unshare", "-m", "sh", "-c", bind, "sh")


def with_names(folder: Path, host: str, names: str) -> tuple[str, ...]:
    """What goes before a command so that it runs on a host of that name, with `names` in the file
    of hosts that is returned by `hosts_file`; no name server is there."""
    path = hosts_file(folder, host)
    path.write_text(f"127.0.0.1 localhost\n{names}\n")
    bind = f'mount --bind {path} /etc/hosts && hostname {host} && exec "$@"'
    return ("unshare", "-m", "-u", "sh", "-c", bind, "sh")


def hosts_file(folder: Path, host: str) -> Path:
    """Its /etc/hosts; what is appended there is known at once."""
    return folder / f"hosts.{host}"

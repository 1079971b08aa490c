"""A network namespace for each node, and a switch between them that can be cut."""

import subprocess


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


class Networks:
    """Nodes at 10.9.0.10 and up, the store at 10.9.0.1; to be made inside a namespace of our own."""

    address = "10.9.0.1"

    def __init__(self, nodes: int) -> None:
        _ip("link", "add", "switch", "type", "bridge")
        _ip("addr", "add", f"{self.address}/24", "dev", "switch")
        _ip("link", "set", "switch", "up")
        self._holders = [self._add(number) for number in range(nodes)]

    def _add(self, number: int) -> "subprocess.Popen[bytes]":
        """A process that holds node `number`'s namespace open."""
        command = ["unshare", "--net", "sh", "-c", "echo; exec sleep 300"]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert holder.stdout is not None
        holder.stdout.readline()
        pid = str(holder.pid)
        _ip("link", "add", f"port{number}", "type", "veth", "peer", "eth0", "netns", pid)
        _ip("link", "set", f"port{number}", "master", "switch", "up")
        for inside in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"10.9.0.{10 + number}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            subprocess.run(["nsenter", "-t", pid, "-n", "ip", *inside], check=True)
        return holder

    def inside(self, number: int) -> str:
        """Path of the namespace of a node."""
        return f"/proc/{self._holders[number].pid}/ns/net"

    def cut(self) -> None:
        """No node reaches another one any more."""
        for number in range(len(self._holders)):
            _ip("link", "set", f"port{number}", "down")

    def close(self) -> None:
        for number, holder in enumerate(self._holders):
            _ip("link", "del", f"port{number}")
            holder.kill()
            holder.wait()
        _ip("link", "del", "switch")

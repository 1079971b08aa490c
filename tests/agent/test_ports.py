"""Sockets that listen from the start, on the address and from the ports that were asked for."""

import contextlib
import socket
import subprocess
import sys

import pytest

from elastic.agent.ports import connected, listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", ""])
def test_clients_connect_before_anybody_accepts(host: str) -> None:
    with listen(host) as listener:
        port = listener.getsockname()[1]
        with contextlib.ExitStack() as clients:
            for _ in range(200):
                clients.enter_context(socket.create_connection((host or "127.0.0.1", port), 60))


def test_first_free_port_of_a_range() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
        with listen("127.0.0.1", range(port, port + 50)) as second:
            assert port < second.getsockname()[1] < port + 50
        with pytest.raises(OSError, match=f"no port to listen on at 127.0.0.1, of {port}-{port}"):
            listen("127.0.0.1", range(port, port + 1))


def test_every_address_of_both_kinds() -> None:
    with listen("") as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), 60).close()


STORE = """
import os, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_store_is_a_client_of_its_own_and_does_not_count() -> None:
    command = [sys.executable, "-c", STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port, pid = map(int, process.stdout.readline().split())
        assert not connected(port, pid)
        with socket.create_connection(("127.0.0.1", port)):
            assert connected(port, pid)
        assert not connected(port, pid)
        process.kill()

"""What goes wrong between ranks: collectives that do not fit, stores, ports, networks."""

import argparse
import ctypes
import os
import signal
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

Args = argparse.Namespace


def other_shape(args: Args) -> None:
    dist.all_reduce(torch.ones(7 + args.variant * 4096))


def other_type(args: Args) -> None:
    dist.all_reduce(torch.ones(16 * 32, dtype=torch.float64))


def other_call(args: Args) -> None:
    dist.broadcast(torch.ones(32, 16), src=args.on)


def skips_one(args: Args) -> None:
    """The others do one collective that this rank does not."""
    if int(os.environ["RANK"]) != args.on:
        dist.all_reduce(torch.ones(3))


skips_one.everywhere = True  # type: ignore[attr-defined]


def barrier_alone(args: Args) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=3))


def misses_barrier(args: Args) -> None:
    if int(os.environ["RANK"]) == args.on:
        time.sleep(60)
    dist.monitored_barrier(timeout=timedelta(seconds=3), wait_all_ranks=bool(args.variant))


misses_barrier.everywhere = True  # type: ignore[attr-defined]


def hangs(args: Args) -> None:
    match args.variant:
        case 0:
            time.sleep(120)
        case 1:
            while True:
                pass
        case 2:
            os.kill(os.getpid(), signal.SIGSTOP)


def store_wait(args: Args) -> None:
    store = dist.distributed_c10d._get_default_store()
    store.get("never/set") if args.variant else store.wait(["never"], timedelta(seconds=2))


def asks_store(args: Args) -> None:
    """Every rank works with the store until it is gone."""
    store = dist.distributed_c10d._get_default_store()
    rank = os.environ["RANK"]
    with open(f"waiting-{rank}", "w") as file:
        file.write(str(os.getpid()))
    number = 0
    while True:
        store.set(f"beat/{rank}", str(number))
        number += 1
        time.sleep(0.05)


asks_store.everywhere = True  # type: ignore[attr-defined]


def port_taken(args: Args) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        match args.variant:
            case 0:
                socket.socket().bind(("127.0.0.1", port))
            case 1:
                TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            case 2:
                import http.server

                http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler)
            case 3:
                import asyncio

                async def serve() -> None:
                    await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", port)

                asyncio.run(serve())


def nobody_listens(args: Args) -> None:
    """The address of another host's service, where nothing answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    match args.variant:
        case 0:
            TCPStore("127.0.0.1", port, timeout=timedelta(seconds=3))
        case 1:
            socket.create_connection(("127.0.0.1", port), timeout=3)
        case 2:
            import urllib.request

            urllib.request.urlopen(f"http://127.0.0.1:{port}/dataset", timeout=3)


def unknown_host(args: Args) -> None:
    if args.variant:
        TCPStore("worker-0.job.invalid", 29500, timeout=timedelta(seconds=3))
    socket.getaddrinfo("worker-0.job.invalid", 29500)


def _no_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x40000000) == 0, os.strerror(ctypes.get_errno())


def unreachable(args: Args) -> None:
    """A network of its own in which there is nothing."""
    _no_network()
    if args.variant:
        TCPStore("10.1.2.3", 29500, timeout=timedelta(seconds=3))
    socket.create_connection(("10.1.2.3", 29500), timeout=3)


def reset(args: Args) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.close()
        client.recv(1)


def wraps_the_peers_end(args: Args) -> None:
    """Its peers turn what they meet into an error of their own, and exit."""
    if int(os.environ["RANK"]) == args.on:
        raise ValueError("the learning rate is not positive: -0.001")
    try:
        for _ in range(200):
            dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        print(f"fatal: {error}", file=sys.stderr)
        if args.variant:
            sys.exit(1)
        raise ConnectionError("lost the other ranks") from error


wraps_the_peers_end.everywhere = True  # type: ignore[attr-defined]


def trains_on(args: Args) -> None:
    with open(f"waiting-{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    while True:
        dist.all_reduce(torch.ones(1 << 16))


trains_on.everywhere = True  # type: ignore[attr-defined]

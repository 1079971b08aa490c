"""Who keeps this rank's snapshots: its agent under `elastic-run`, else a keeper process of its node.

Ranks without an agent find one another's keepers through the job's own store, the one that
`init_process_group` uses. What an earlier start left there may still be found in it, so nobody believes
an address before it has been answered there.
"""

import contextlib
import functools
import ipaddress
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from elastic import session
from elastic.agent import boot
from elastic.proto import codec, descriptors, env, keeper_process, version
from elastic.proto.env import Launch
from elastic.proto.errors import CheckpointError, CodecError
from elastic.proto.keeper_process import Answer, Await, Greeting, Join, Refused, Start
from elastic.session import Session

T = TypeVar("T")

log = logging.getLogger(__name__)

TIMEOUT = 900.0
"""Seconds that the other ranks may take to make their checkpointers, and an earlier start of the job to
write what it left: longer than a keeper tries to."""
CONNECT_TIMEOUT = 10.0
"""Seconds that one try to reach rank 0's keeper may take, and that nothing is said of it."""
ROUND = 1
"""Of every start, for each is a job of its own: torchrun's nodes do not agree how many there were."""
PAUSE = 0.2
"""Seconds until an address is looked up again: a store tells of a value that is there, not of a change."""


def find(path: str) -> tuple[Session, socket.socket]:
    """Who this rank is, and its connection to the keeper of its slots (`proto/keeper.py`).

    Without an agent it waits for all ranks of the job, which must come here for the same path, and for
    an earlier start of it on this host, until its newest snapshot is on storage. Raises
    `CheckpointError`, `UsageError`, `LinkError`.
    """
    found = session.current()
    if found is None:
        return _find_keeper_process(path)
    end = session.open_keeper()
    if end is None:
        raise CheckpointError(
            "a Checkpointer belongs to a rank itself, not to a process it started"
        )
    return found, end


def _find_keeper_process(path: str) -> tuple[Session, socket.socket]:
    launch = _launch()
    board = _Board(path, launch)
    if launch.local_rank:
        job, end = _retry(lambda: _join(board, launch), f"{path}: the keeper of this node")
    else:
        _await_earlier(path)
        end = _start(path, launch, board)
        try:
            job = _welcomed(end.recv(keeper_process.DATAGRAM))
        except OSError as error:
            raise CheckpointError(f"{path}: the keeper process ended: see above") from error
    end.settimeout(None)
    found = Session(
        job=job,
        uid=job,
        launch="",
        node="",
        round=ROUND,
        rank=launch.rank,
        local_rank=launch.local_rank,
        world_size=launch.world_size,
        local_world_size=launch.local_world_size,
    )
    return found, end


def _launch() -> Launch:
    """The process group knows better than the environment, where there is one."""
    found = env.launch()
    if dist.is_initialized():
        return replace(found, rank=dist.get_rank(), world_size=dist.get_world_size())
    return found


# --- on this node ----------------------------------------------------------------------------


def _connect(name: str) -> socket.socket:
    """To a keeper of ours on this host. Raises OSError."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.settimeout(TIMEOUT + CONNECT_TIMEOUT)
    try:
        end.connect(f"\0{name}")
    except BaseException:
        end.close()
        raise
    return end


def _await_earlier(path: str) -> None:
    """Until no keeper holds snapshots of ranks that are gone: what is loaded must not be older."""
    begin = f"@{keeper_process.prefix(path)}"
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    names = {name for line in lines if (name := line.rpartition(" ")[2]).startswith(begin)}
    for name in names:
        try:
            with _connect(name[1:]) as end:
                if keeper_process.peer_uid(end) == os.getuid():
                    end.sendall(codec.dumps(Await()).encode())
                    if not descriptors.ready([end.fileno()], CONNECT_TIMEOUT):
                        log.warning(
                            "%s: waits for an earlier start's newest step to be written, %g s at most: "
                            "what holds it up is in that start's log", path, TIMEOUT,
                        )  # fmt: skip
                    end.recv(1)
        except TimeoutError as error:
            raise CheckpointError(
                f"{path}: what an earlier start left is not on storage after {TIMEOUT:g} s: see what "
                "holds its elastic-keeper processes up"
            ) from error
        except OSError:
            continue  # it has ended


def _start(path: str, launch: Launch, board: "_Board") -> socket.socket:
    """This node's keeper, and the other ranks of the node told of it; our connection to it."""
    name = f"{keeper_process.prefix(path)}{secrets.token_hex(16)}"
    job, secret, peers = uuid.uuid4().hex, secrets.token_hex(16), None
    with contextlib.ExitStack() as ours:
        if launch.rank:
            job, peers = _retry(lambda: _greet(board, launch), f"{path}: the keeper of rank 0")
        elif launch.local_world_size < launch.world_size:
            peers = _listen(launch.master_addr)
        if peers is not None:
            ours.enter_context(peers)
        listener = ours.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(f"\0{name}")
        listener.listen(launch.local_world_size + 16)
        end = _connect(name)  # before it runs, so that it sees the end of this, whenever that comes
        end.sendall(codec.dumps(Join(rank=launch.rank)).encode())
        start = Start(
            checkpoint=path,
            job=job,
            round=ROUND,
            rank=launch.rank,
            local_world_size=launch.local_world_size,
            world_size=launch.world_size,
            timeout=TIMEOUT,
            listener=listener.fileno(),
            peers=None if peers is None else peers.fileno(),
            secret=secret,
        )
        _run(start)
        if peers is not None and launch.rank == 0:
            host = launch.master_addr or socket.gethostname()
            board.tell("hub", _Hub(host=host, port=peers.getsockname()[1], secret=secret))
    if launch.local_world_size > 1:
        board.tell(f"node {launch.rank}", _Node(name=name))
    return end


def _run(start: Start) -> None:
    """Start a keeper, which is nobody's child once this returns."""
    passed = descriptors.memory_file(codec.dumps(start).encode())
    try:
        done = subprocess.run(
            boot.command(sys.executable, "elastic.checkpoint.keeper.process", str(passed)),
            cwd="/",
            env=env.process_environment(),
            pass_fds=[fd for fd in (passed, start.listener, start.peers) if fd is not None],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(passed)
    if done.returncode:
        raise CheckpointError(
            f"{start.checkpoint}: the keeper process cannot be started: see above"
        )


def _join(board: "_Board", launch: Launch) -> tuple[str, socket.socket]:
    """Be heard by the keeper that local rank 0 has started. Raises OSError."""
    name = board.ask(f"node {launch.rank - launch.local_rank}", _Node).name
    end = _connect(name)
    try:
        end.sendall(codec.dumps(Join(rank=launch.rank)).encode())
        return _welcomed(end.recv(keeper_process.DATAGRAM)), end
    except BaseException:
        end.close()
        raise


# --- between nodes ---------------------------------------------------------------------------


def _listen(host: str) -> socket.socket:
    """Where the keepers of other nodes connect: as far as the address of rank 0 reaches."""
    with contextlib.suppress(ValueError):
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _greet(board: "_Board", launch: Launch) -> tuple[str, socket.socket]:
    """Be heard by rank 0's keeper, which answers once all nodes are. Raises OSError."""
    hub = board.ask("hub", _Hub)
    greeting = Greeting(
        version=str(version.WIRE),
        secret=hub.secret,
        rank=launch.rank,
        local_world_size=launch.local_world_size,
    )
    end = socket.create_connection((hub.host, hub.port), CONNECT_TIMEOUT)
    try:
        end.settimeout(TIMEOUT + CONNECT_TIMEOUT)
        end.sendall(keeper_process.line(greeting))
        with end.makefile("rb", buffering=0) as lines:  # reads no byte of what comes after the line
            return _welcomed(lines.readline(keeper_process.DATAGRAM)), end
    except BaseException:
        end.close()
        raise


def _welcomed(data: bytes) -> str:
    """The job, by a keeper's answer. Raises OSError where there is none, `CheckpointError`."""
    if not data:
        raise ConnectionResetError("nobody who is meant answers there")
    try:
        answer = codec.loads(Answer, data)
    except CodecError as error:
        raise ConnectionResetError("somebody else answers there") from error
    if isinstance(answer, Refused):
        raise CheckpointError(answer.reason)
    return str(answer.job)


def _retry(
    attempt: Callable[[], tuple[str, socket.socket]], what: str
) -> tuple[str, socket.socket]:
    """Once it can be reached: what is told of it may still be an earlier start's."""
    began, said = monotonic(), False
    while True:
        try:
            return attempt()
        except OSError as error:
            if monotonic() - began >= TIMEOUT:
                raise CheckpointError(f"{what} cannot be reached from here: {error}") from error
            if not said and monotonic() - began >= CONNECT_TIMEOUT:
                log.warning("%s cannot be reached yet: %s", what, error)
                said = True
        threading.Event().wait(PAUSE)


# --- the job's store -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hub:
    """Where rank 0's keeper listens for others."""

    host: str
    port: int
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """Where a node's keeper listens for its ranks."""

    name: str


class _Board:
    """What ranks tell one another of one checkpoint's keepers."""

    def __init__(self, path: str, launch: Launch) -> None:
        self._path = path
        self._launch = launch
        self._prefix = f"elastic/{path}"

    def tell(self, key: str, value: _Hub | _Node) -> None:
        with self._in_words():
            self._store().set(f"{self._prefix}/{key}", codec.dumps(value))

    def ask(self, key: str, kind: type[T]) -> T:
        """Waits for who is to tell it."""
        name = f"{self._prefix}/{key}"
        with self._in_words():
            self._store().wait([name], timedelta(seconds=TIMEOUT))
            found: T = codec.loads(kind, self._store().get(name))
            return found

    def _store(self) -> Store:
        if dist.is_initialized():
            return distributed_c10d._get_default_store()
        if not (self._launch.master_addr and self._launch.master_port):
            raise CheckpointError(
                "WORLD_SIZE is set, but MASTER_ADDR and MASTER_PORT are not: start the script with "
                "torchrun, or call init_process_group before you make a Checkpointer"
            )
        return _rendezvous()

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch's own are among these
            why = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{self._path}: rank {self._launch.rank} finds the others not, each of which must "
                f"make a Checkpointer of this path: {why}"
            ) from error


@functools.cache
def _rendezvous() -> Store:
    """For the life of this process: where rank 0 serves it, a process group that comes later uses it."""
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=TIMEOUT)))
    found: Store = store
    return found

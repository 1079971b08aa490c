"""Random, truncated and oversized bytes on everything that listens, while a job trains."""

import contextlib
import random
import socket
from collections.abc import Callable, Iterator

import grpc
import pytest

from benchmarks import wire
from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from tests.e2e.harness import FORK, Job, Node, processes
from tests.e2e.harness.ports import listening

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def payloads(seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    yield b""
    yield b"\0"
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield PREFACE[:11]
    yield PREFACE
    yield PREFACE + b"\0\0\0\4\0\0\0\0\0" + chance.randbytes(100)
    yield PREFACE + b"\xff\xff\xff\1\5\0\0\0\1" + chance.randbytes(1 << 16)  # a frame of 16 MiB
    yield b"\x16\x03\x01" + chance.randbytes(512)  # like TLS
    yield b"\xff" * (1 << 20)
    for size in (1, 7, 64, 1000, 100_000):
        yield chance.randbytes(size)


def throw(address: tuple[str, int], data: bytes) -> None:
    """Send it all, as far as it is taken, and hang up."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        end.settimeout(0.2)
        end.recv(4096)


def test_bytes_that_are_no_message(job: Job) -> None:
    """On the master's port, the knock port, the round's store and the spare one."""
    node = job.start(FORK, script=("--torch",))
    number = job.wait_for_steps(2)
    addresses = _addresses(job, node)
    assert len(addresses) >= 4, addresses
    held = []
    for seed, address in enumerate(sorted(addresses)):
        for data in payloads(seed):
            throw(address, data)
        for _ in range(30):  # who connects, and says nothing
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(address, timeout=5))
    try:
        job.wait_for_more_steps(number, 2)
        assert job.round() == number, job.dump()
        processes.kill(job.rank(number, 1))  # and a new round forms under them
        job.wait_for_steps(2, after=number)
    finally:
        for end in held:
            end.close()
    job.finish()
    job.ends(0)


def _addresses(job: Job, node: Node) -> set[tuple[str, int]]:
    found = {(job.address, job.port)}
    for process in job.left():
        if process.pid in (node.guardian, node.agent()) or "elastic-store" in process.command:
            found |= listening(process.pid)
    return found


def hello(**changes: object) -> pb.FromAgent:
    fields: dict[str, object] = {
        "version": pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
        "run_id": "job",
        "node_id": "stranger",
        "incarnation": 7,
        "slots": 1,
    }
    return pb.FromAgent(hello=pb.Hello(**(fields | changes)))  # type: ignore[arg-type]


far = version.Version(version.WIRE.major, version.WIRE.minor + 2)
REFUSED: list[tuple[pb.FromAgent, str]] = [
    (hello(version=pb.Version(major=far.major, minor=far.minor)), "install releases"),
    (hello(run_id="another"), "this master runs job 'job', not 'another'"),
    (hello(job_uid="of another"), "another job under the same name"),
    (hello(epoch=1 << 40), "is in epoch"),
    (hello(slots=0), "1 to 4096 slots"),
    (hello(slots=1 << 31), "1 to 4096 slots"),
    (hello(node_id=""), "a node's name has 1 to 256 characters"),
    (pb.FromAgent(leaving=pb.Leaving(reason="x")), "the first message is Hello"),
    (pb.FromAgent(), "the first message is Hello"),
    (hello(node_id="x" * (5 << 20)), "larger"),
]


def test_messages_that_are_none_of_this_job(job: Job) -> None:
    """Each is refused with a reason, and the job does not notice."""
    job.start()
    number = job.wait_for_steps(2)
    with grpc.insecure_channel(f"{job.address}:{job.port}") as channel:
        stub = master_pb2_grpc.MasterStub(channel)
        for message, words in REFUSED:
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Attach(iter([message]), timeout=30))
            assert words in str(refused.value.details()), job.dump()
        raw: Callable[..., Iterator[bytes]] = channel.stream_stream("/elastic.v1.Master/Attach")
        for data in (b"\xff" * 50, random.Random(1).randbytes(1000), b"\x0a\xff\xff\xff\xff\x0f"):
            with pytest.raises(grpc.RpcError):
                list(raw(iter([data]), timeout=30))
        unknown: Callable[..., bytes] = channel.unary_unary("/elastic.v1.Master/Nothing")
        with pytest.raises(grpc.RpcError):
            unknown(b"", timeout=30)
    job.wait_for_more_steps(number, 2)
    assert job.round() == number, job.dump()
    job.finish()
    job.ends(0)


def test_a_token_keeps_strangers_out(job: Job) -> None:
    secret = {"ELASTIC_JOB_TOKEN": "correct horse"}
    job.start(nodes="1:2", nproc=1, environ=secret)
    number = job.wait_for_steps(1)
    joins = ("--rdzv-conf", "is_host=false", "--join-timeout", "20")
    for wrong in ({"ELASTIC_JOB_TOKEN": "wrong"}, {}):
        stranger = job.start(*joins, nodes="1:2", nproc=1, environ=wrong, name=f"s{len(wrong)}")
        assert stranger.exit_code() == 1, job.dump()
        said = "refuses this node: wrong or missing job token: give this job's own in ELASTIC_JOB_TOKEN"
        assert said in stranger.said(), job.dump()
    job.wait_for_more_steps(number, 1)
    assert job.round() == number, job.dump()
    job.start(*joins, nodes="1:2", nproc=1, environ=secret, name="friend")
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0, 1, 1, 0)


@pytest.mark.parametrize("token", [b"wrong", b"\xff\xfe\x80", "é".encode()])
def test_a_token_of_any_bytes_is_refused_in_a_sentence(job: Job, token: bytes) -> None:
    job.start(nproc=1, environ={"ELASTIC_JOB_TOKEN": "correct horse"})
    number = job.wait_for_steps(1)
    fields = b"\x00" + bytes((13,)) + b"elastic-token" + bytes((len(token),)) + token
    head = wire.call("/elastic.v1.Control/GetStatus", "x")[9:] + fields
    call = wire.frame(wire.HEADERS, wire.END_HEADERS, wire.STREAM, head)
    said = bytearray()
    with socket.create_connection((job.address, job.port), timeout=30) as end:
        end.sendall(wire.opening() + call)
        while not _answered(bytes(said)):
            said += end.recv(4096)
    assert b"wrong or missing job token" in said
    job.wait_for_more_steps(number, 1)
    job.finish()
    job.ends(0)


def _answered(said: bytes) -> bool:
    """Whether a call has been answered to its end."""
    frames = wire.frames(bytearray(said))
    return any(kind == wire.HEADERS and flags & wire.END_STREAM for kind, flags, _ in frames)

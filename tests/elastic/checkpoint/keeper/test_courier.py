"""The courier as it runs: what another node's images arrive as is what they were, or is no image."""

import contextlib
import http.client
import mmap
import os
import random
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint.keeper.courier import Pace
from elastic.checkpoint.load.peers import Gone, Peer, head
from elastic.checkpoint.state.image import header_bytes, parse
from elastic.proto import courier, datagrams, slot, sums
from elastic.proto.courier import Drop, Failed, Fetch, Fetched, Forget, Hold, Serve, Tls
from elastic.proto.errors import SlotError
from elastic.proto.moment import Moment
from elastic.proto.sums import Chunk
from tests.proto.chunks import damaged

AT = Moment(3, 7)
SECRET = "0123456789abcdef"
PART = 64 << 10


class Slot:
    """One that a rank writes to."""

    def __init__(self, size: int) -> None:
        self.fd = slot.create(slot.bytes_for(size))
        self.view = memoryview(mmap.mmap(self.fd, 0))
        self.generation = 0

    def write(self, data: bytes, at: Moment = AT, rank: int = 0) -> None:
        ends = [*range(PART, len(data), PART), len(data)]
        chunks = [
            Chunk(end, sums.checksum(data[start:end]))
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        self.generation += 1
        stamp = slot.Stamp(
            job="j", step=at.step, round=at.round, rank=rank, world_size=2,
            generation=self.generation,
        )  # fmt: skip
        claim = self.claimed()
        writing = slot.Writing(self.view, stamp, len(data) + sums.ENTRY * len(chunks), len(chunks))
        writing.image[: len(data)] = data
        writing.commit(chunks, (7, 8))
        os.close(claim)

    def claimed(self) -> int:
        """For writing, once whoever reads it is done: a reader has the last byte before that."""
        held: list[int] = []

        def free() -> bool:
            claim = slot.claim(self.fd, exclusive=True)
            held.extend([] if claim is None else [claim])
            return bool(held)

        wait_until(free)
        return held[0]

    def put(self, image: bytes, rank: int) -> None:
        """A whole image, with its own table."""
        self.generation += 1
        stamp = slot.Stamp(
            job="j", step=AT.step, round=AT.round, rank=rank, world_size=2,
            generation=self.generation,
        )  # fmt: skip
        laid = parse(image[: header_bytes(image)], len(image))
        chunks = sums.unpack(memoryview(image)[laid.sums_at :], len(image))
        writing = slot.Writing(self.view, stamp, len(image), len(chunks))
        writing.image[: laid.sums_at] = image[: laid.sums_at]
        writing.commit(chunks, (rank,))

    @property
    def data(self) -> bytes | None:
        """What it holds, verified; None: nothing whole."""
        try:
            found = slot.read(self.view)
        except SlotError:
            return None
        assert not damaged(found.image, found.chunks)
        return bytes(found.image[: found.chunks[-1].end])


class Courier:
    """The process, as an agent has it."""

    def __init__(self, tls: Tls | None = None) -> None:
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.settimeout(60)
        self.listener = socket.create_server(("127.0.0.1", 0))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "elastic.checkpoint.keeper.courier", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        scheme = "http" if tls is None else "https"
        self.base = f"{scheme}://127.0.0.1:{self.listener.getsockname()[1]}/{SECRET}"
        self.ask(Serve(secret=SECRET, tls=tls), self.listener.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.end.close()
        self.listener.close()

    def ask(self, message: courier.ToCourier, *fds: int) -> None:
        datagrams.send(self.end, message, fds)

    def answer(self) -> Fetched | Failed:
        received = datagrams.receive(self.end, courier.ToAgent, 0)
        assert received is not None, "the courier died"
        answer: Fetched | Failed = received[0]
        return answer

    def hold(self, one: Slot, name: str = "1", checkpoint: str = "/data/a b?/ü") -> None:
        self.ask(Hold(name=name, checkpoint=checkpoint), one.fd)

    def address(self, rank: int = 0, at: Moment = AT, checkpoint: str = "/data/a b?/ü") -> str:
        return courier.address(self.base, checkpoint, at, rank)

    def fetch(self, base: str, one: Slot, *, number: int = 1, bandwidth: int | None = None) -> None:
        message = Fetch(
            id=number, base=base, checkpoint="/data/a b?/ü", round=AT.round, step=AT.step, rank=0,
            bandwidth=bandwidth,
        )  # fmt: skip
        self.ask(message, one.fd)

    def get(self, path: str, span: str | None) -> tuple[int, bytes]:
        parts = urlsplit(self.base)
        with contextlib.closing(
            http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
        ) as connection:
            connection.request("GET", path, headers={} if span is None else {"Range": span})
            answer = connection.getresponse()
            return answer.status, answer.read()


def read(address: str, start: int, end: int, tls: Tls | None = None) -> memoryview:
    """Bytes of an image, by a connection of their own."""
    with contextlib.closing(Peer(address, tls)) as peer:
        return peer.read(start, end)


@pytest.fixture(scope="module")
def serving() -> Iterator[Courier]:
    with Courier() as made:
        yield made


@pytest.fixture(scope="module")
def fetching() -> Iterator[Courier]:
    with Courier() as made:
        yield made


@pytest.fixture
def full(serving: Courier) -> Iterator[tuple[Slot, bytes]]:
    """A slot that is served."""
    data = random.Random(5).randbytes(40 * PART + 11)
    one = Slot(2 * len(data))
    one.write(data)
    serving.hold(one)
    wait_until(lambda: serving.get(urlsplit(serving.address()).path, "bytes=0-0")[0] == 206)
    yield one, data
    serving.ask(Drop(name="1"))
    wait_until(lambda: serving.get(urlsplit(serving.address()).path, "bytes=0-0")[0] == 410)
    os.close(one.fd)


@pytest.fixture
def peer(serving: Courier, full: tuple[Slot, bytes]) -> Iterator[Peer]:
    with contextlib.closing(Peer(serving.address(), None)) as made:
        yield made


def wait_until(seen: Callable[[], bool]) -> None:
    """Each look is a request that is answered, or a try to claim."""
    deadline = time.monotonic() + 150
    while not seen():
        assert time.monotonic() < deadline, "it is never seen"


# --- serving -------------------------------------------------------------------------------------


def test_ranges_of_a_slot_are_what_it_holds(peer: Peer, full: tuple[Slot, bytes]) -> None:
    one, data = full
    _, found, chunks = head(peer)
    assert (found.stamp.step, found.stamp.round, found.units) == (7, 3, (7, 8))
    assert chunks == slot.read(one.view).chunks
    for start, end in ((0, 1), (0, len(data)), (PART - 1, PART + 1), (len(data) - 1, len(data))):
        assert peer.read(start, end) == data[start:end]
    assert len(peer._idle) == 1, "one connection for all"


def test_twenty_read_at_a_time(peer: Peer, full: tuple[Slot, bytes]) -> None:
    _, data = full
    right: list[bool] = []

    def some(number: int) -> None:
        own = random.Random(number)
        for _ in range(10):
            start = own.randrange(len(data))
            end = own.randint(start + 1, len(data))
            right.append(peer.read(start, end) == data[start:end])

    threads = [threading.Thread(target=some, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200


def test_only_who_knows_the_secret_is_shown_what_is_there(
    serving: Courier, full: tuple[Slot, bytes]
) -> None:
    path = urlsplit(serving.address()).path
    _, secret, name, *_ = path.split("/")
    hostile = [
        "/", "//", "/../../etc/passwd", f"/{secret}", f"/{secret}/", f"/{secret}/{name}",
        f"/{secret[:-1]}/{name}/3/7/0", f"/{secret}x/{name}/3/7/0", f"//{name}/3/7/0",
        f"/{secret}/{name}/3/7/0/0", f"/{secret}/{name}/3/7/../../7/0", f"/{secret}/{name}/3/7/x",
        f"/{secret}/{name}/" + "9" * 60_000 + "/7/0",
    ]  # fmt: skip
    not_there = [
        f"/{secret}/{name}/3/7/1", f"/{secret}/{name}/3/8/0", f"/{secret}/%2Fdata/3/7/0",
        f"/{secret}/{name}/3/7/-1", f"/{secret}/{name}/" + "9" * 4000 + "/7/0",
        f"/{secret}/%00/3/7/0", f"/{secret}/%ff%fe/3/7/0",
    ]  # fmt: skip
    for wrong in hostile + not_there:
        status, body = serving.get(wrong, "bytes=0-9")
        expected = 404 if wrong in hostile else 410
        assert (status, slot.MAGIC in body) == (expected, False), wrong[:100]
    for span in (None, "", "bytes", "bytes=", "bytes=1", "bytes=-1", "bytes=5-", "bytes=5-4", "x=0-9",
                 "bytes=0-1,3-4", "bytes=a-b", "bytes=-5--4", "bytes=0-" + "9" * 5000):  # fmt: skip
        assert serving.get(path, span)[0] == 404, span
    assert serving.get(path, "bytes=0-" + "9" * 30)[0] == 416
    assert serving.get(path, f"bytes=0-{len(full[0].view)}")[0] == 416
    assert serving.get(path, f"bytes=0-{len(full[0].view) - 1}")[0] == 206
    assert serving.get("/" + "a" * (1 << 20), "bytes=0-9")[0] == 414


def test_who_stalls_keeps_nobody_waiting_and_nothing_locked_once_gone(
    serving: Courier, full: tuple[Slot, bytes]
) -> None:
    one, data = full
    parts = urlsplit(serving.address())
    with contextlib.ExitStack() as stalled:
        for _ in range(5):
            end = stalled.enter_context(socket.create_connection((parts.hostname, parts.port)))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            end.sendall(f"GET {parts.path} HTTP/1.1\r\nRange: bytes=0-{len(data)}\r\n\r\n".encode())
            assert end.recv(12) == b"HTTP/1.1 206"
        assert read(serving.address(), 0, 99) == data[:99]

    def free() -> bool:
        claim = slot.claim(one.fd, exclusive=True)
        if claim is not None:
            os.close(claim)
        return claim is not None or serving.get(parts.path, "bytes=0-0")[0] == 0

    wait_until(free)


def test_what_is_written_over_is_gone_and_never_mixed(
    serving: Courier, peer: Peer, full: tuple[Slot, bytes]
) -> None:
    one, data = full
    assert peer.read(0, 10) == data[:10]
    one.write(data[::-1], Moment(3, 8))
    with pytest.raises(Gone, match="no slot holds it"):
        peer.read(10, 20)
    claim = one.claimed()
    with pytest.raises(Gone):
        read(serving.address(at=Moment(3, 8)), 0, 10)
    os.close(claim)
    assert read(serving.address(at=Moment(3, 8)), 0, 10) == data[::-1][:10]


# --- fetching ------------------------------------------------------------------------------------


@pytest.fixture
def empty() -> Iterator[Slot]:
    made = Slot(50 * PART)
    yield made
    os.close(made.fd)


def test_what_is_fetched_is_whole(
    serving: Courier, fetching: Courier, full: tuple[Slot, bytes], empty: Slot
) -> None:
    empty.write(b"older", Moment(2, 9), rank=1)
    fetching.fetch(serving.base, empty)
    assert fetching.answer() == Fetched(id=1)
    assert empty.data == full[1]
    was, now = slot.read(full[0].view), slot.read(empty.view)
    assert (now.stamp, now.units, now.chunks) == (was.stamp, was.units, was.chunks)


def test_damage_at_the_source_is_named_and_becomes_no_replica(
    serving: Courier, fetching: Courier, full: tuple[Slot, bytes], empty: Slot
) -> None:
    one, _ = full
    one.view[slot.PAGE + 5 * PART + 3] ^= 1
    fetching.fetch(serving.base, empty)
    said = f"bytes {5 * PART} to {6 * PART} of the image are damaged"
    assert fetching.answer() == Failed(id=1, error=said, gone=True)
    assert empty.data is None
    one.view[slot.PAGE + 5 * PART + 3] ^= 1
    one.view[256] ^= 1  # the job's name
    fetching.fetch(serving.base, empty)
    assert fetching.answer() == Failed(
        id=1, error="the slot's header is damaged: its checksum does not match", gone=True
    )


def test_what_does_not_fit_or_is_not_there_is_said(
    serving: Courier, fetching: Courier, full: tuple[Slot, bytes], empty: Slot
) -> None:
    small = Slot(PART)
    fetching.fetch(serving.base, small)
    answer = fetching.answer()
    assert isinstance(answer, Failed)
    assert (answer.gone, "does not fit into" in answer.error) == (True, True)
    os.close(small.fd)
    fetching.fetch(serving.base[:-1], empty)
    answer = fetching.answer()
    assert isinstance(answer, Failed)
    assert not answer.gone, "where it was served before, another courier may have the port"
    one, data = full
    one.write(data, Moment(3, 8))
    fetching.fetch(serving.base, empty)
    answer = fetching.answer()
    assert isinstance(answer, Failed)
    assert (answer.gone, "no slot holds it" in answer.error) == (True, True)
    one.write(data)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        fetching.fetch(f"http://127.0.0.1:{nobody.getsockname()[1]}/{SECRET}", empty)
        answer = fetching.answer()
    assert isinstance(answer, Failed)
    assert not answer.gone, "it may come back"
    claim = slot.claim(empty.fd, exclusive=False)
    assert claim is not None
    fetching.fetch(serving.base, empty)
    assert fetching.answer() == Failed(id=1, error="the slot for a replica is being read")
    os.close(claim)


def test_a_fetch_that_is_forgotten_ends_and_leaves_nothing(
    serving: Courier, fetching: Courier, full: tuple[Slot, bytes], empty: Slot
) -> None:
    fetching.fetch(serving.base, empty, bandwidth=1)
    fetching.ask(Forget(id=1))
    assert fetching.answer() == Failed(id=1, error="it is not wanted any more", gone=True)
    assert empty.data is None
    claim = slot.claim(empty.fd, exclusive=True)
    assert claim is not None
    os.close(claim)


def test_a_source_that_dies_in_the_midst_is_no_image_and_may_be_asked_again(empty: Slot) -> None:
    data = random.Random(6).randbytes(40 * PART)
    one = Slot(2 * len(data))
    one.write(data)
    with Courier() as source, Courier() as fetching:
        source.hold(one)
        wait_until(lambda: source.get(urlsplit(source.address()).path, "bytes=0-0")[0] == 206)
        fetching.fetch(source.base, empty, bandwidth=20 * PART)
        first = empty.view[slot.PAGE : slot.PAGE + PART]
        while first != data[:PART]:
            assert source.process.poll() is None
        source.process.kill()
        source.listener.close()
        answer = fetching.answer()
        assert isinstance(answer, Failed)
        assert not answer.gone
        assert empty.data is None
    os.close(one.fd)


@given(
    st.integers(1, 1 << 40),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), min_size=1, max_size=20),
)
def test_no_more_is_read_than_the_bandwidth_allows(
    limit: int, asked: list[tuple[int, float]]
) -> None:
    pace, now, over = Pace(), 0.0, 0.0
    pace.limit = limit
    for size, later in asked:
        now += later
        begins = now + pace.delay(size, now)
        assert begins >= over * (1 - 1e-9), "while another's bytes are read"
        assert begins <= max(now, over) * (1 + 1e-9), "no later than it must"
        over = begins + size / limit
    pace.limit = None
    assert pace.delay(1 << 40, now) == 0


# --- TLS -----------------------------------------------------------------------------------------


def issued(authority: trustme.CA, folder: Path) -> Tls:
    folder.mkdir()
    certificate = authority.issue_cert("node")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return Tls(
        cert=str(folder / "cert.pem"), key=str(folder / "key.pem"), ca=str(folder / "ca.pem")
    )


def test_with_tls_only_a_certificate_of_the_job_reads(tmp_path: Path, empty: Slot) -> None:
    authority = trustme.CA()
    ours, foreign = issued(authority, tmp_path / "ours"), issued(trustme.CA(), tmp_path / "foreign")
    data = random.Random(7).randbytes(9 * PART)
    one = Slot(len(data) + 4096)
    one.write(data)
    with Courier(ours) as courier_of_ours:
        courier_of_ours.hold(one)
        address = courier_of_ours.address()

        def is_read() -> bool:
            with contextlib.suppress(Gone):
                return read(address, 0, len(data), ours) == data
            return False

        wait_until(is_read)
        for refused in (
            lambda: read(address, 0, 9, foreign),
            lambda: read(address.replace("https", "http"), 0, 9),
            lambda: no_certificate(address, ours),
        ):
            with pytest.raises(OSError, match=r"."):  # a reset, or TLS's own words
                refused()
        courier_of_ours.fetch(courier_of_ours.base, empty)
        assert courier_of_ours.answer() == Fetched(id=1)
        assert empty.data == data
    os.close(one.fd)


def no_certificate(address: str, tls: Tls) -> None:
    parts = urlsplit(address)
    context = ssl.create_default_context(cafile=tls.ca)
    context.check_hostname = False
    with (
        socket.create_connection((parts.hostname, parts.port)) as plain,
        context.wrap_socket(plain) as end,
    ):
        end.sendall(f"GET {parts.path} HTTP/1.1\r\nRange: bytes=0-9\r\n\r\n".encode())
        if not end.recv(1):
            raise ConnectionResetError

"""`elasticctl` and a master of another release: neighbours work together, others say so in a line."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.calls import MasterClient
from elastic.proto.client import open_channel
from elastic.proto.errors import MasterRefused
from elastic.proto.version import Version
from tests.elastic.asking import Ask
from tests.master.serving import NO_SECURITY, MasterProcess, ready, reserved, within

MAJOR, MINOR = version.WIRE


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a master of this release, which waits for its nodes."""
    folder = tmp_path_factory.mktemp("versions")
    with reserved() as address, MasterProcess(folder, address) as process:
        asyncio.run(process.said("job begins"))
        asyncio.run(ready(address))
        yield address


# --- a master refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(("minor", "code"), [(MINOR, 0), (MINOR + 1, 0), (MINOR + 9, 1)])
def test_a_newer_elasticctl(
    address: str, ask: Ask, monkeypatch: pytest.MonkeyPatch, minor: int, code: int
) -> None:
    monkeypatch.setattr(version, "WIRE", Version(MAJOR, minor))
    for verb in ("status", "events"):
        answer = ask("--master", address, verb)
        assert answer.code == code
        if code:
            ours = f"elasticctl speaks version {MAJOR}.{minor}, this side {MAJOR}.{MINOR}"
            assert f"the master at {address} refuses: {ours}, which is older: install" in answer.err
            assert (answer.out, len(answer.err.splitlines())) == ("", 1)


@pytest.mark.parametrize(
    ("named", "refusal"),
    [
        ("1.0", ""),
        (None, ""),  # the first release names none
        ("1.1", ""),
        ("1.2", "elasticctl speaks version 1.2, this side 1.0, which is older"),
        ("9.0", "elasticctl speaks version 9.0"),
        ("soon", "'soon' is no version"),
        ("1.", "'1.' is no version"),
        ("1.0.0", "'1.0.0' is no version"),
        ("9" * 5000 + ".0", "is no version"),
    ],
)
@within(120)
async def test_every_call_names_its_version(address: str, named: str | None, refusal: str) -> None:
    metadata = () if named is None else (("elastic-version", named),)
    async with open_channel(address, NO_SECURITY) as channel:
        stub: Any = master_pb2_grpc.ControlStub(channel)
        streams = (
            stub.ListEvents(pb.ListEventsRequest(), metadata=metadata),
            stub.ReadLog(pb.ReadLogRequest(), metadata=metadata),
        )
        calls = (
            stub.GetStatus(pb.GetStatusRequest(), metadata=metadata),
            stub.Restart(pb.RestartRequest(), metadata=metadata),
            stub.Drain(pb.DrainRequest(node_id="nobody"), metadata=metadata),
        )
        for stream in streams:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [message async for message in stream]
        for call in (*streams, *calls):
            code, details = await call.code(), await call.details()
            assert (code is grpc.StatusCode.FAILED_PRECONDITION) == bool(refusal)
            assert refusal in details
            assert "\n" not in details
            assert len(details) < 200


# --- elasticctl refuses ---------------------------------------------------------------------------


class Another(master_pb2_grpc.ControlServicer):
    """A master that checks no versions: the first release's, if it names none."""

    def __init__(self, named: Version | None) -> None:
        self._named = named

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        named = self._named
        mine = None if named is None else pb.Version(major=named.major, minor=named.minor)
        return pb.Status(run_id="job", version=mine)


@contextlib.asynccontextmanager
async def another(named: Version | None) -> AsyncIterator[str]:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    master_pb2_grpc.add_ControlServicer_to_server(Another(named), server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("named", "ours", "refusal"),
    [
        (None, "1.0", ""),
        (None, "1.1", ""),
        (None, "1.2", "speaks version 1.0, this side 1.2, which is newer"),
        ("1.1", "1.0", ""),
        ("1.9", "1.0", "speaks version 1.9, this side 1.0, which is older"),
        ("2.0", "1.0", "speaks version 2.0, this side 1.0, which is older"),
    ],
)
@within(120)
async def test_a_master_of_another_release(
    monkeypatch: pytest.MonkeyPatch, named: str | None, ours: str, refusal: str
) -> None:
    mine = version.parse(ours)
    assert mine is not None
    monkeypatch.setattr(version, "WIRE", mine)
    async with (
        another(None if named is None else version.parse(named)) as address,
        MasterClient(address, NO_SECURITY) as client,
    ):
        if not refusal:
            assert (await client.status()).run_id == "job"
            return
        with pytest.raises(MasterRefused) as caught:
            await client.status()
        assert f"the master at {address} {refusal}: install releases" in str(caught.value)

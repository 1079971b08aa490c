"""What a person asks of a job's master, one call a verb; what goes wrong is said in one sentence."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.client import VERSION_KEY, open_channel
from elastic.proto.errors import (
    ElasticError,
    MasterRefused,
    MasterUnreachable,
    NotFound,
    ProtocolMismatch,
)
from elastic.proto.security import Security

TIMEOUT = 10.0
"""Seconds that a unary call may take."""
LOOK_TIMEOUT = 60.0
"""The same where a node first looks on storage."""
PAUSE = 0.1
"""Seconds between two tries to reach a master that may be starting again."""

_FOREIGN = ("http/2", "http1", "ssl", "tls", "handshake", "certificate")
_FOREIGN_CODES = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)

T = TypeVar("T")


class MasterClient:
    """A channel to one master, open within `async with`. Every method raises ElasticError:
    MasterUnreachable where nobody answers, MasterRefused where somebody does and says no.
    """

    def __init__(self, address: str, security: Security) -> None:
        self._address = address
        self._security = security
        self._metadata = (*security.metadata(), (VERSION_KEY, str(version.WIRE)))

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, self._security)
        self._stub: Any = master_pb2_grpc.ControlStub(self._channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def status(self, patience: float = 0.0) -> pb.Status:
        """patience: seconds that a master may be away, because it is just started again.

        What every other call rests on: a master too far from our version is not asked any more.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            try:
                request = pb.GetStatusRequest()
                status: pb.Status = await self._one(
                    self._stub.GetStatus(request, metadata=self._metadata, timeout=TIMEOUT)
                )
                return self._checked(status)
            except MasterUnreachable:
                if loop.time() >= deadline:
                    raise
            await asyncio.sleep(PAUSE)

    def _checked(self, status: pb.Status) -> pb.Status:
        theirs = version.FIRST
        if status.HasField("version"):
            theirs = version.Version(status.version.major, status.version.minor)
        try:
            version.check(f"the master at {self._address}", theirs, version.WIRE)
        except ProtocolMismatch as error:
            raise MasterRefused(str(error)) from error
        return status

    async def restart(self, reason: str, from_step: int = 0) -> str:
        """Returns what the master says to it. from_step: of the checkpoint to go back to; 0: none."""
        request = pb.RestartRequest(reason=reason, from_step=from_step)
        timeout = LOOK_TIMEOUT if from_step else TIMEOUT
        call = self._stub.Restart(request, metadata=self._metadata, timeout=timeout)
        return str((await self._one(call)).message)

    async def drain(self, node_id: str, reason: str) -> str:
        """Drain a node, or the whole job where `node_id` is empty."""
        request = pb.DrainRequest(node_id=node_id, reason=reason)
        call = self._stub.Drain(request, metadata=self._metadata, timeout=TIMEOUT)
        return str((await self._one(call)).message)

    def events(self, after: int, follow: bool) -> AsyncIterator[pb.EventRecord]:
        """Those with a higher sequence number than `after`."""
        request = pb.ListEventsRequest(after=after, follow=follow)
        return self._many(self._stub.ListEvents(request, metadata=self._metadata))

    def read_log(self, request: pb.ReadLogRequest) -> AsyncIterator[pb.LogChunk]:
        return self._many(self._stub.ReadLog(request, metadata=self._metadata))

    async def _one(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error

    async def _many(self, stream: Any) -> AsyncIterator[Any]:
        try:
            async for message in stream:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._explain(error) from error
        finally:
            stream.cancel()

    def _explain(self, error: grpc.aio.AioRpcError) -> ElasticError:
        code, details = error.code(), error.details() or ""
        where = f"the master at {self._address}"
        if code is grpc.StatusCode.UNAUTHENTICATED:
            if self._security.token:
                return MasterRefused(f"{where} does not take this token: give this job's own")
            return MasterRefused(
                f"{where} wants the job's token: set ELASTIC_JOB_TOKEN, or give --token-file FILE"
            )
        if code is grpc.StatusCode.NOT_FOUND:
            return NotFound(details)
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION):
            return MasterRefused(f"{where} refuses: {details}")
        said = details.lower()
        if "hostname lookup" in said or "dns resolution" in said:
            return MasterUnreachable(
                f"the host of {self._address} is not found: is the name right?"
            )
        if code in _FOREIGN_CODES or any(word in said for word in _FOREIGN):
            return MasterRefused(
                f"what answers at {self._address} is no master that we understand: check the "
                "address, and --tls-cert, --tls-key and --tls-ca"
            )
        # One that hangs up at once was killed just now, or waits for TLS: another try tells.
        hung_up = "failed to connect" in said and ("closed" in said or "reset" in said)
        why = "refused" if "refused" in said else details.rpartition(": ")[2][:100] or code.name
        tls = ", and does it want --tls-cert, --tls-key and --tls-ca" if hung_up else ""
        return MasterUnreachable(
            f"no master answers at {self._address} ({why}): is the address right, does the job "
            f"still run{tls}?"
        )

"""The agent's stream to the master: attaches, attaches again when it breaks, tells and hears."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.client import open_channel
from elastic.proto.errors import MasterRefused, MasterUnreachable, ProtocolMismatch
from elastic.proto.security import TOKEN, Security

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5
"""Seconds between two attempts to attach."""

SYNC_TIMEOUT = 5.0
"""Seconds that an end waits for the master's last orders; it may be busy with thousands that end."""

_REFUSALS = {
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
}

_MAY_BE_TLS = ("ssl", "certificate", "socket closed", "connection reset")
"""Words of grpc's; a master that wants TLS, or another certificate, just hangs up."""


class Uplink:
    """`hello` makes the first message of each stream, `heard` takes every directive and request."""

    def __init__(
        self,
        address: str,
        security: Security,
        hello: Callable[[], pb.Hello],
        heard: Callable[[pb.ToAgent], None],
    ) -> None:
        self.epoch = 0
        self.job_uid = ""
        self.heartbeat_interval = 1.0
        self.attached = asyncio.Event()
        self.last_contact = asyncio.get_running_loop().time()
        self._address = address
        self._security = security
        self._hello = hello
        self._heard = heard
        self._outbox: asyncio.Queue[pb.FromAgent | None] = asyncio.Queue()
        """None: no more will be said."""
        self._detached = asyncio.Event()
        """Cleared from a stream's Hello to its end; what happens after a Hello must be said after it."""
        self._detached.set()
        self._synced = asyncio.Event()
        """Set by the master's answer, or when no stream is left to bring it."""
        self._last = False

    def send(self, message: pb.FromAgent) -> None:
        """Say something; without a stream it is dropped, since the next Hello says what matters."""
        if not self._detached.is_set():
            self._outbox.put_nowait(message)

    def last(self) -> None:
        """Open no other stream than this one: who says Hello is taken in."""
        self._last = True

    def leave(self, reason: str) -> None:
        """Say that this node leaves."""
        self.last()
        self.send(pb.FromAgent(leaving=pb.Leaving(reason=reason)))

    async def synced(self, timeout: float = SYNC_TIMEOUT) -> None:
        """Wait until the master's orders that follow from all that was said are here; without a stream
        there are none."""
        if self._detached.is_set():
            return
        self._synced.clear()
        self.send(pb.FromAgent(sync=pb.Sync()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._synced.wait()

    async def goodbye(self, timeout: float) -> None:
        """Wait until the master has read all that was said; a stream that is cut may lose it."""
        self._outbox.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._detached.wait()

    async def run(self, patience: Callable[[], float]) -> None:
        """Keep a stream open for ever; returns when the last one ends.

        patience: seconds without a master after which to give up, asked anew each time.
        Raises MasterRefused, or MasterUnreachable when patience is over.
        """
        loop = asyncio.get_running_loop()
        pause, said = FIRST_PAUSE, False
        while not self._last:
            before = self.last_contact
            trouble = await self._attach()
            if self.last_contact != before:
                pause, said = FIRST_PAUSE, False
            silent = loop.time() - self.last_contact
            if silent > patience():
                raise MasterUnreachable(
                    f"no master answers at {self._address} for {silent:.0f} s ({trouble}): is the "
                    "address right, and is elastic-run running on the node that owns it?"
                )
            if silent > 5 and not said:
                said = True
                log.warning("waiting for a master at %s (%s)", self._address, trouble)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    async def _attach(self) -> str:
        """One stream, to its end; returns why it ended."""
        channel: grpc.aio.Channel | None = None
        stream: grpc.aio.StreamStreamCall | None = None
        writer: asyncio.Task[None] | None = None
        try:
            channel = open_channel(self._address, self._security)
            stub = master_pb2_grpc.MasterStub(channel)
            stream = stub.Attach(metadata=self._security.metadata())
            self._outbox = asyncio.Queue()
            self._detached.clear()
            async with asyncio.timeout(10.0):
                await stream.write(pb.FromAgent(hello=self._hello()))
                first = await stream.read()
            if first is grpc.aio.EOF or not first.HasField("welcome"):
                return self._judge(await stream.code(), await stream.details() or "")
            self._welcome(first.welcome)
            writer = asyncio.get_running_loop().create_task(self._write(stream))
            while (message := await stream.read()) is not grpc.aio.EOF:
                self.last_contact = asyncio.get_running_loop().time()
                if message.HasField("synced"):
                    self._synced.set()
                else:
                    self._heard(message)
            return self._judge(await stream.code(), await stream.details() or "")
        except grpc.aio.AioRpcError as error:
            return self._judge(error.code(), error.details() or "")
        except (TimeoutError, asyncio.InvalidStateError, grpc.aio.BaseError):
            return "no answer"
        except OSError as error:
            return str(error)  # a TLS file that is being replaced
        finally:
            if self.attached.is_set():  # a master that has nothing to say is no absent one
                self.last_contact = asyncio.get_running_loop().time()
            self.attached.clear()
            self._detached.set()
            self._synced.set()
            if writer is not None:
                writer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writer
            if stream is not None:
                stream.cancel()  # which closing the channel does in some versions of grpc only
            if channel is not None:
                await channel.close()

    def _judge(self, code: grpc.StatusCode, details: str) -> str:
        """Why a stream ended, in words; raises MasterRefused where another try is of no use."""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            raise MasterRefused(
                f"what listens at {self._address} is no master of elastic-run ({details[:200]}): is "
                "the address right, and does another program have the port?"
            )
        if code is grpc.StatusCode.UNAUTHENTICATED:
            details += f": give this job's own in {TOKEN}, or --token-file"
        if code in _REFUSALS:
            raise MasterRefused(f"the master at {self._address} refuses this node: {details}")
        said = details.rpartition("last error: ")[2].partition(": SSL_ERROR")[0][:200] or code.name
        if any(word in details.lower() for word in _MAY_BE_TLS):
            said += "; do --tls-cert, --tls-key and --tls-ca fit the master's?"
        return said

    def _welcome(self, welcome: pb.Welcome) -> None:
        try:
            theirs = version.Version(welcome.version.major, welcome.version.minor)
            version.check("the master", theirs, version.WIRE)
        except ProtocolMismatch as error:
            raise MasterRefused(str(error)) from error
        if welcome.epoch < self.epoch:
            raise MasterRefused(f"the master at {self._address} is an old one")
        self.epoch, self.job_uid = welcome.epoch, welcome.job_uid
        self.heartbeat_interval = welcome.heartbeat_interval or 1.0
        self.last_contact = asyncio.get_running_loop().time()
        self.attached.set()

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        outbox = self._outbox
        with contextlib.suppress(
            grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.BaseError
        ):
            while (message := await outbox.get()) is not None:
                await stream.write(message)
            await stream.done_writing()

    async def room(self) -> None:
        """Wait until little is waiting to be sent, so that bulk does not hold up reports."""
        outbox = self._outbox
        while outbox.qsize() > 4 and outbox is self._outbox and self.attached.is_set():
            await asyncio.sleep(0.01)

"""A real master on loopback, and a small real agent that speaks to it."""

import asyncio
import contextlib
import functools
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio

from elastic.master.launcher import Launcher
from elastic.master.main import MasterSettings, serve
from elastic.master.policy import Policy
from elastic.proto import master_pb2 as pb
from elastic.proto import master_pb2_grpc, version
from elastic.proto.calls import MasterClient
from elastic.proto.client import open_channel
from elastic.proto.errors import ElasticError
from elastic.proto.security import Security

ROOT = Path(__file__).parents[2]
RUN_ID = "job"
NO_SECURITY = Security()
REFUSES = "127.0.0.1:9"
"""Nobody listens there: who gives it as its knock address is gone once its stream breaks."""


def within(seconds: float) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a coroutine as a test, `seconds` at most."""

    def wrap(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def call(*args: Any, **named: Any) -> None:
            async def bounded() -> None:
                async with asyncio.timeout(seconds):
                    await test(*args, **named)

            asyncio.run(bounded())

        return call

    return wrap


@contextlib.contextmanager
def reserved(host: str = "127.0.0.1") -> Iterator[str]:
    """host:port of a port that only a master can have, as a guardian keeps it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = holder.getsockname()[1]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def settings_of(
    run_dir: Path, address: str, security: Security = NO_SECURITY, policy: Policy | None = None
) -> MasterSettings:
    return MasterSettings(
        run_id=RUN_ID,
        address=address,
        run_dir=run_dir,
        policy=policy or Policy(),
        security=security,
    )


@contextlib.asynccontextmanager
async def master(
    run_dir: Path,
    *,
    security: Security = NO_SECURITY,
    host: str = "127.0.0.1",
    policy: Policy | None = None,
    launcher: Launcher | None = None,
) -> AsyncIterator[str]:
    """Serve a job in this process; its address. The job is stopped at the end."""
    with reserved(host) as address:
        settings = settings_of(run_dir, address, security, policy)
        serving = asyncio.create_task(serve(settings, launcher))
        near = address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        try:
            await ready(near, security)
            yield near
        finally:
            async with MasterClient(near, security) as client:
                with contextlib.suppress(ElasticError):  # it may be over already
                    await client.drain("", "the test is over")
            await serving


async def ready(address: str, security: Security = NO_SECURITY) -> pb.Status:
    """Wait until a master answers there."""
    async with MasterClient(address, security) as client:
        return await client.status(patience=120.0)


class MasterProcess:
    """A master in a process of its own, one node a round; `wrapper` is put before its command."""

    def __init__(self, run_dir: Path, address: str, *wrapper: str) -> None:
        self.address = address
        command = [sys.executable, "-m", "tests.master.serving", str(run_dir), address]
        self.process = subprocess.Popen(
            [*wrapper, *command], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    async def said(self, text: str) -> str:
        """The next line of its log that has `text` in it."""
        assert self.process.stderr is not None
        while line := await asyncio.to_thread(self.process.stderr.readline):
            if text in line:
                return line
        raise AssertionError(f"the master ended without saying {text!r}")


class Agent:
    """One stream. What it says is as terse as can be; `hello` overrides any field."""

    def __init__(
        self, address: str, node: str = "node-a", *, security: Security = NO_SECURITY, **hello: Any
    ) -> None:
        self.node = node
        self.welcome = pb.Welcome()
        self._channel = open_channel(address, security)
        stub: Any = master_pb2_grpc.MasterStub(self._channel)
        self._attach = functools.partial(stub.Attach, metadata=security.metadata())
        self._stream = self._attach()
        self._saying = asyncio.Lock()
        fields: dict[str, Any] = {
            "version": pb.Version(major=version.WIRE.major, minor=version.WIRE.minor),
            "run_id": RUN_ID,
            "node_id": node,
            "incarnation": 1,
            "slots": 1,
            "knock_address": REFUSES,
            "spare_store": "127.0.0.1:1",
        }
        self.hello = pb.Hello(**(fields | hello))

    async def __aenter__(self) -> Self:
        """Attach; AioRpcError if the master will not have us."""
        try:
            await self._greet()
            self.welcome = (await self.hear()).welcome
        except BaseException:
            await self.close()
            raise
        return self

    async def _greet(self) -> None:
        """One that is refused before it has said a word is not told why by gRPC, and asks again."""
        for last in (False, False, True):
            try:
                return await self.say(hello=self.hello)
            except grpc.aio.AioRpcError as error:
                if last or error.code() is not grpc.StatusCode.INTERNAL:
                    raise
                self._stream = self._attach()

    async def __aexit__(self, *_: object) -> None:
        """Say goodbye, so that the job's end does not wait for it to come back."""
        with contextlib.suppress(
            grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError
        ):
            await self.say(leaving=pb.Leaving(reason="the test is over"))
        await self.close()

    async def close(self) -> None:
        self._stream.cancel()  # which closing the channel does in some versions of grpc only
        await self._channel.close(None)

    async def say(self, **body: Any) -> None:
        async with self._saying:  # gRPC takes one at a time
            await self._stream.write(pb.FromAgent(**body))

    async def hear(self) -> pb.ToAgent:
        """The next message; AioRpcError once the master has ended the stream."""
        message = await self._stream.read()
        if message is grpc.aio.EOF:
            code, details = await self._stream.code(), await self._stream.details()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        assert isinstance(message, pb.ToAgent)
        return message

    async def ordered(self, kind: int) -> pb.Directive:
        """The next directive of that kind; one to exit is answered with a goodbye."""
        while True:
            message = await self.hear()
            if message.HasField("directive") and message.directive.kind == kind:
                if kind == pb.Directive.EXIT:
                    await self.say(leaving=pb.Leaving(reason="told to exit"))
                return message.directive

    async def report(self, phase: pb.NodeReport.Phase, round_: int) -> None:
        await self.say(report=pb.NodeReport(round=round_, phase=phase))


async def noted(address: str, text: str, security: Security = NO_SECURITY) -> str:
    """Wait until the master has noted a reason with `text` in it."""
    async with MasterClient(address, security) as client:
        async for event in client.events(0, follow=True):
            if text in event.reason:
                return event.reason
    raise AssertionError(f"the job ended without {text!r}")


async def node_states(address: str, security: Security = NO_SECURITY) -> dict[str, str]:
    async with MasterClient(address, security) as client:
        status = await client.status()
    return {node.node_id: node.state for node in status.nodes}


def may_unshare(what: str) -> bool:
    return (
        subprocess.run(["unshare", what, "true"], check=False, capture_output=True).returncode == 0
    )


if __name__ == "__main__":
    import logging

    from elastic.master.main import main

    logging.basicConfig(level=logging.INFO)
    sys.exit(main(settings_of(Path(sys.argv[1]), sys.argv[2])))

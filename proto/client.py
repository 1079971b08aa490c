"""Channels and servers with token, TLS and limits; nobody else opens one."""

import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from elastic.proto import version
from elastic.proto.errors import ProtocolMismatch
from elastic.proto.limits import MAX_ANSWER, MAX_REQUEST
from elastic.proto.security import TOKEN_KEY, Security

VERSION_KEY = "elastic-version"
"""Of a call's metadata: the version, WIRE, of who calls the Control service."""

MOST_CALLS = 1 << 17
"""Calls that may wait to be taken up: every agent of a job attaches in the same instant.

grpc's own limits are 1,000 (it begins to refuse some) and 3,000 (it refuses all).
"""

_WINDOW = [
    # grpc would find one out by a ping for each message, which wakes its idle threads some eighty times.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 20),
]
"""Bytes of a stream that may be on their way."""
_CHANNEL = [
    *_WINDOW,
    ("grpc.max_send_message_length", MAX_ANSWER),  # who receives it says what is too large
    ("grpc.max_receive_message_length", MAX_ANSWER),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # as long as one try to connect may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
]
_SERVER = [
    *_WINDOW,
    ("grpc.max_send_message_length", MAX_ANSWER),
    ("grpc.max_receive_message_length", MAX_REQUEST),
    ("grpc.so_reuseport", 1),  # the guardian's reservation holds the port; see docs/architecture.md
    ("grpc.server.max_pending_requests", MOST_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MOST_CALLS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
]


def open_channel(address: str, security: Security) -> grpc.aio.Channel:
    """A channel to the master at host:port."""
    if security.cert is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL)
    credentials = grpc.ssl_channel_credentials(*_files(security))
    return grpc.aio.secure_channel(address, credentials, options=_CHANNEL)


def open_server(address: str, security: Security) -> grpc.aio.Server:
    """A server bound to host:port; RuntimeError if the port cannot be had."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_in_one_line)
    checks = [_TokenCheck(security.token)] if security.token else []
    server = grpc.aio.server(interceptors=[*checks, _VersionCheck()], options=_SERVER)
    if security.cert is None:
        server.add_insecure_port(address)
    else:
        ca, key, cert = _files(security)
        credentials = grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=ca, require_client_auth=True
        )
        server.add_secure_port(address, credentials)
    return server


def _in_one_line(record: logging.LogRecord) -> bool:
    """Bytes of a stranger that are no message or no text: worth a line, and not grpc's traceback."""
    if record.exc_info and isinstance(record.exc_info[1], (DecodeError, UnicodeDecodeError)):
        record.msg, record.args, record.exc_info = (
            "somebody sent bytes that make no sense",
            (),
            None,
        )
    return True


def _files(security: Security) -> tuple[bytes, bytes, bytes]:
    """Authority, key and certificate; `Security.check` has found them readable."""
    assert security.ca is not None
    assert security.key is not None
    assert security.cert is not None
    return security.ca.read_bytes(), security.key.read_bytes(), security.cert.read_bytes()


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call that does not bring the job's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

        async def refuse_stream(request: object, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or missing job token")

        self._refuse = grpc.stream_stream_rpc_method_handler(refuse_stream)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = str(dict(details.invocation_metadata or ()).get(TOKEN_KEY, ""))
        if hmac.compare_digest(given.encode(errors="surrogatepass"), self._token):
            return await continuation(details)
        return self._refuse


class _VersionCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses what an elasticctl asks whose version is too far from ours; agents say theirs in Hello."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if not details.method.startswith("/elastic.v1.Control/"):
            return await continuation(details)
        named = str(dict(details.invocation_metadata or ()).get(VERSION_KEY, version.FIRST))
        theirs, refusal = version.parse(named), f"{named[:20]!r} is no version"
        try:
            if theirs is not None:
                version.check("elasticctl", theirs, version.WIRE)
                return await continuation(details)
        except ProtocolMismatch as error:
            refusal = str(error)

        async def refuse(request: object, context: Any) -> None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)

        return grpc.stream_stream_rpc_method_handler(refuse)

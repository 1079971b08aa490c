"""Just enough HTTP/2 for one gRPC stream a connection: what a simulated agent sends and hears.

RFC 9113 (frames) and RFC 7541 (header fields, sent as literals and never read back). A channel of
grpc's own costs about 100 KB and several threads' work; ten thousand of them on the machine of the
master would measure the client.
"""

import struct
from collections.abc import Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
STREAM = 1
WINDOW = (1 << 31) - 1

Frame = tuple[int, int, bytes]
"""Type, flags, payload."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame: 24-bit length, type, flags, stream, payload."""
    return struct.pack("!BHBBI", 0, len(payload), kind, flags, stream) + payload


def opening() -> bytes:
    """What a client says first; its windows are so wide that it need not widen them again."""
    settings = struct.pack("!HIHI", 2, 0, 4, WINDOW)  # no push; window of a stream
    wider = struct.pack("!I", WINDOW - 65_535)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(SETTINGS, 0, 0, settings)
        + frame(WINDOW_UPDATE, 0, 0, wider)
    )


def call(path: str, authority: str) -> bytes:
    """The head of a call, on the connection's only stream."""
    indexed = b"\x83\x86"  # POST, http
    fields = _literal(b"\x04", path) + _literal(b"\x01", authority)
    fields += _literal(b"\x0f\x10", "application/grpc")  # content-type
    fields += b"\x00" + _text("te") + _text("trailers")
    return frame(HEADERS, END_HEADERS, STREAM, indexed + fields)


def message(body: bytes) -> bytes:
    """One gRPC message, uncompressed, in one frame."""
    return frame(DATA, 0, STREAM, struct.pack("!BI", 0, len(body)) + body)


def answer(kind: int, flags: int, payload: bytes) -> bytes:
    """What the peer must be answered to a frame: settings and pings are acknowledged."""
    if kind == SETTINGS and not flags & ACK:
        return frame(SETTINGS, ACK, 0, b"")
    if kind == PING and not flags & ACK:
        return frame(PING, ACK, 0, payload)
    return b""


def frames(buffer: bytearray) -> Iterator[Frame]:
    """Take whole frames off the front of `buffer`."""
    start = 0
    while len(buffer) - start >= 9:
        end = start + 9 + int.from_bytes(buffer[start : start + 3])
        if len(buffer) < end:
            break
        yield buffer[start + 3], buffer[start + 4], bytes(buffer[start + 9 : end])
        start = end
    del buffer[:start]


def messages(buffer: bytearray) -> Iterator[bytes]:
    """Take whole gRPC messages off the front of `buffer`, the data of a stream."""
    start = 0
    while len(buffer) - start >= 5:
        end = start + 5 + int.from_bytes(buffer[start + 1 : start + 5])
        if len(buffer) < end:
            break
        yield bytes(buffer[start + 5 : end])
        start = end
    del buffer[:start]


def _text(value: str) -> bytes:
    raw = value.encode()
    assert len(raw) < 127
    return bytes([len(raw)]) + raw


def _literal(name: bytes, value: str) -> bytes:
    """A header field whose name is in the static table, not to be indexed."""
    return name + _text(value)

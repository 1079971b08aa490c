"""The knock: how the master asks, beside the stream, whether a node's agent still lives.

The master connects to the node's knock address and reads one line, `elastic-knock 1 <incarnation>`.
The guardian holds the listening socket, the agent accepts; docs/architecture.md says what each
outcome means.
"""

from elastic.proto.errors import ProtocolMismatch

_WORD = "elastic-knock"
_VERSION = 1
LIMIT = 64
"""Bytes of an answer at most."""


def answer(incarnation: int) -> bytes:
    return f"{_WORD} {_VERSION} {incarnation}\n".encode()


def parse(line: bytes) -> int:
    """The incarnation in an answer; ProtocolMismatch if it is none."""
    words = line.decode("ascii", "replace").split()
    if len(words) != 3 or words[0] != _WORD or not words[2].isdecimal():
        raise ProtocolMismatch("who answered the knock is no agent of ours")
    return int(words[2])

"""Ranks' logs on their way from the node that has them to whoever asked the master for them."""

import asyncio
from collections.abc import AsyncIterator

from elastic.master.session import Session
from elastic.proto import master_pb2 as pb

CHUNKS = 64
"""Chunks of one log that wait for who asked at most."""


class LogRelay:
    """One reader a request; none of them can hold up the streams, or fill our memory."""

    def __init__(self) -> None:
        self._readers: dict[int, tuple[Session, asyncio.Queue[pb.LogChunk]]] = {}
        self._requests = 0

    async def read(
        self, session: Session, request: pb.ReadLogRequest
    ) -> AsyncIterator[pb.LogChunk]:
        """What the agent at the other end of `session` has; the last chunk is marked as the end."""
        self._requests += 1
        number = self._requests
        inbox: asyncio.Queue[pb.LogChunk] = asyncio.Queue(CHUNKS)
        self._readers[number] = session, inbox
        try:
            relayed = pb.ReadLogRequest()
            relayed.CopyFrom(request)
            relayed.request = number
            session.push(pb.ToAgent(read_log=relayed))
            while not (chunk := await inbox.get()).end:
                yield chunk
            yield chunk
        finally:
            del self._readers[number]
            self._cancel(session, number)

    def take(self, session: Session, chunk: pb.LogChunk) -> None:
        """An agent sent this; who reads too slowly loses the rest."""
        number = chunk.request
        owner, inbox = self._readers.get(number, (None, None))
        if owner is not session or inbox is None:
            return
        if inbox.full():
            self._cancel(session, number)
            _end(inbox, "read too slowly: ask for less with --tail")
        else:
            inbox.put_nowait(chunk)

    def end(self, session: Session) -> None:
        """The agent is away: who reads from there gets no more."""
        for owner, inbox in self._readers.values():
            if owner is session:
                _end(inbox, "the node went away")

    def _cancel(self, session: Session, number: int) -> None:
        session.push(pb.ToAgent(read_log=pb.ReadLogRequest(request=number, cancel=True)))


def _end(inbox: asyncio.Queue[pb.LogChunk], error: str) -> None:
    if inbox.full():
        inbox.get_nowait()
    inbox.put_nowait(pb.LogChunk(end=True, error=error))

"""The sockets between this node's agent and its ranks' checkpointers."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator

from elastic.proto import descriptors, keeper
from elastic.proto import master_pb2 as pb
from elastic.proto.errors import LinkError, ProtocolMismatch

log = logging.getLogger(__name__)


class Client:
    """A rank's checkpointer. What is said to it never blocks: an answer waits until it reads, and of what
    it is told unasked only the newest does."""

    def __init__(
        self,
        end: socket.socket,
        round_: int,
        *,
        hear: Callable[["Client", keeper.ToKeeper], None],
        roomy: Callable[["Client"], None],
        gone: Callable[["Client"], None],
    ) -> None:
        """end: our end of its socket, ours from here on; hear: takes what it says, and may raise
        `LinkError` or `ProtocolMismatch`; roomy: it reads again, and may be told what is new; gone:
        called once, when it has closed its end or is cut off."""
        self._end = end
        self._hear, self._roomy, self._gone = hear, roomy, gone
        self.round = round_
        self.said: keeper.Open | None = None
        """What it is."""
        self.asks: keeper.Load | None = None
        """What it is to load, or has loaded last."""
        self.load = 0
        """Which load of its round that is."""
        self.question = 0
        """The number of what waits for an answer; 0: nothing does."""
        self.look: pb.StorageLook | None = None
        """What it was asked to look for on storage."""
        self._told: tuple[keeper.ToRank, ...] = ()
        self._unsent: tuple[keeper.ToRank, list[int]] | None = None
        """An answer that its socket has no room for yet, with descriptors that are ours."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        end.setblocking(False)
        asyncio.get_running_loop().add_reader(end, self._readable)

    def close(self) -> None:
        if self._end.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._end)
        loop.remove_writer(self._end)
        self._end.close()
        if self._unsent is not None:
            descriptors.close(self._unsent[1])
        if not self.closed.done():
            self.closed.set_result(None)
        self._gone(self)

    def answer(self, message: keeper.ToRank, fds: tuple[int, ...] = ()) -> None:
        """It waits where what was said unasked has not been read yet."""
        with self._cutting():
            if self._unsent is not None:
                raise LinkError("it asks and does not read")
            try:
                keeper.send(self._end, message, fds)
            except BlockingIOError:
                self._unsent = message, [os.dup(fd) for fd in fds]
                asyncio.get_running_loop().add_writer(self._end, self._writable)

    def tell(self, newest: tuple[keeper.ToRank, ...]) -> bool:
        """All that is to be known to it now; what it was told is not said again. False where it does not
        read, or is gone: then later, as `roomy` says."""
        sent = False
        with self._cutting():
            try:
                for message in newest:
                    if message not in self._told:
                        keeper.send(self._end, message)
                self._told = newest
                sent = True
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._end, self._writable)
        return sent

    def was_told(self, kind: type[keeper.ToRank]) -> bool:
        return any(isinstance(message, kind) for message in self._told)

    def _readable(self) -> None:
        with self._cutting():
            while self._end.fileno() >= 0:
                try:
                    message = keeper.receive_from_rank(self._end)
                except BlockingIOError:
                    return
                if message is None:
                    self.close()
                    return
                self._hear(self, message)

    def _writable(self) -> None:
        """It has read something."""
        asyncio.get_running_loop().remove_writer(self._end)
        if self._unsent is not None:
            message, fds = self._unsent
            self._unsent = None
            self.answer(message, tuple(fds))
            descriptors.close(fds)
        if self._end.fileno() >= 0 and self._unsent is None:
            self._roomy(self)

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[None]:
        """Close it for what cannot be gone on with."""
        try:
            yield
        except (BrokenPipeError, ConnectionResetError):
            return  # it is gone: what it said last is still to be read, and then its end
        except (LinkError, ProtocolMismatch, OSError) as error:
            log.warning("a checkpointer is cut off: %s", error)
            self.close()

"""Why this launcher ends: to the container's termination log, and as its exit code."""

from pathlib import Path

from elastic.proto import ending
from elastic.proto import master_pb2 as pb
from elastic.proto.ending import Ended, Ending
from elastic.proto.errors import MasterUnreachable


class LastWords:
    """path: the termination log, written where that file exists."""

    def __init__(self, path: Path, *, detailed: bool) -> None:
        self._path = path
        self._detailed = detailed

    def ordered(self, order: pb.Directive) -> int:
        """The master says exit; returns the exit code of the launcher."""
        told = order.ending
        try:
            kind = Ended(told.kind)
        except ValueError:  # a neighbour of another version
            kind = Ended.USER_ERROR if order.exit_code else Ended.FINISHED
        said = Ending(
            kind=kind,
            rank=told.rank if told.HasField("rank") else None,
            exception=told.exception,
            fingerprint=told.fingerprint,
            step=told.step,
            reason=order.reason,
        )
        return self.say(said, order.exit_code)

    def left(self, kind: Ended, reason: str, code: int) -> int:
        """The node leaves by itself."""
        return self.say(Ending(kind=kind, reason=reason), code)

    def gave_up(self, error: Exception) -> int:
        """No master would have it, or none was found."""
        kind = Ended.MASTER_LOST if isinstance(error, MasterUnreachable) else Ended.REFUSED
        return self.say(Ending(kind=kind, reason=str(error)), 1)

    def say(self, said: Ending, plain: int) -> int:
        """plain: the exit code that torchrun would have; returns ours."""
        ending.leave(self._path, said)
        return said.code(plain, detailed=self._detailed)

"""What runs on a node, and how it ended, as its master is told."""

import asyncio
from collections.abc import Callable, Sequence

from elastic.agent.failures import with_failure
from elastic.proto import master_pb2 as pb

LATE = 0.5
"""Seconds after the end of a rank in which those of all others of its node are awaited, as at the end of each job."""
RATE = 20 << 20
"""Bytes a second. A report holds all failures of its round so far, and hundreds of ranks fail at once."""


class Outcome:
    """Of the newest round here. Its end is told at once, what follows soon after."""

    def __init__(self, send: Callable[[pb.FromAgent], None]) -> None:
        self.report = pb.NodeReport()
        """In each Hello, too."""
        self._send = send
        self._telling: asyncio.TimerHandle | None = None
        self._not_before = 0.0

    @property
    def round(self) -> int:
        return self.report.round

    @property
    def failures(self) -> Sequence[pb.RankFailure]:
        return self.report.failures

    def idle(self, number: int) -> None:
        self.report = pb.NodeReport(round=number, phase=pb.NodeReport.IDLE)

    def running(self, number: int) -> None:
        self.report = pb.NodeReport(round=number, phase=pb.NodeReport.RUNNING)

    def finished(self) -> None:
        self._tell(pb.NodeReport(round=self.round, phase=pb.NodeReport.FINISHED))

    def failed(self, failure: pb.RankFailure) -> None:
        self._tell(with_failure(self.report, failure))

    def ended(self, ranks: Sequence[int]) -> None:
        """These ended with 0, which matters where the others do not soon do so, too."""
        told = pb.NodeReport()
        told.CopyFrom(self.report)
        told.ended[:] = ranks
        if told.failures:
            self._tell(told)
            return
        self.report = told
        asyncio.get_running_loop().call_later(LATE, self._still, told)

    def _still(self, told: pb.NodeReport) -> None:
        if self.report is told:
            self._say()

    def _tell(self, report: pb.NodeReport) -> None:
        self.report = report
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_at(self._not_before, self._say)

    def _say(self) -> None:
        self._telling = None
        took = self.report.ByteSize() / RATE
        self._not_before = asyncio.get_running_loop().time() + took
        self._send(pb.FromAgent(report=self.report))

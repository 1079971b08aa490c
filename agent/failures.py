"""What a node tells of its failures, kept to what the master hears in one message. Pure."""

from elastic.proto import master_pb2 as pb

WHOLE = 1 << 19
"""Bytes of a report, up to which failures are told in full; those that follow are told in brief."""

TEXT, BRIEF = 4096, 160
"""Bytes that are kept of each text of a failure. With 4,096 ranks that all fail, and say as much as
they can, a report still fits (`limits.MAX_REQUEST`); and what the master takes for a symptom, by its
words, it still knows for one.
"""


def with_failure(report: pb.NodeReport, failure: pb.RankFailure) -> pb.NodeReport:
    """The same report with one failure more."""
    limit = TEXT if report.ByteSize() < WHOLE else BRIEF
    told = pb.NodeReport(round=report.round, phase=pb.NodeReport.FAILED, ended=report.ended)
    told.failures.extend([*report.failures, _cut(failure, limit)])
    return told


def _cut(failure: pb.RankFailure, limit: int) -> pb.RankFailure:
    cut = pb.RankFailure()
    cut.CopyFrom(failure)
    cut.error_type = _text(failure.error_type.encode()[:limit])
    cut.message = _text(failure.message.encode()[:limit])
    cut.frame = _text(failure.frame.encode()[:limit])
    cut.log_tail = _text(failure.log_tail.encode()[-limit:])
    if limit == BRIEF:
        del cut.kernel_log[:]  # the first to fail told of it
    return cut


def _text(part: bytes) -> str:
    """Without a character of which only a part is left."""
    return part.decode(errors="ignore")

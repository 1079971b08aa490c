"""A node's report fits into a message, however many ranks fail and whatever they say."""

import pytest

from elastic.agent.failures import BRIEF, WHOLE, with_failure
from elastic.proto import master_pb2 as pb
from elastic.proto.limits import MAX_REQUEST, MOST_SLOTS


def failed(rank: int, letter: str = "x", length: int = 1 << 20) -> pb.RankFailure:
    text = letter * length
    return pb.RankFailure(
        rank=rank,
        local_rank=rank,
        exit_code=-9,
        error_type=text,
        message=text,
        frame=text,
        log_tail=text,
        oom_killed=True,
        what=pb.RankFailure.START,
        kernel_log=["x" * 300] * 8,
    )


def report(count: int, letter: str = "x", length: int = 1 << 20) -> pb.NodeReport:
    told = pb.NodeReport(round=7)
    for rank in range(count):
        told = with_failure(told, failed(rank, letter, length))
    return told


def test_what_fits_is_told_in_full() -> None:
    told = report(8, length=4096)
    assert list(told.failures) == [failed(rank, length=4096) for rank in range(8)]
    assert (told.round, told.phase) == (7, pb.NodeReport.FAILED)


def test_who_fails_after_many_others_is_told_in_brief() -> None:
    told = report(100)
    first, last = told.failures[0], told.failures[-1]
    assert len(first.message) == len(first.log_tail) == 4096
    assert (last.rank, last.exit_code, last.oom_killed) == (99, -9, True)
    assert last.what == pb.RankFailure.START
    assert len(last.error_type) == len(last.message) == BRIEF


def test_the_end_of_a_log_is_what_is_kept_of_it() -> None:
    told = with_failure(pb.NodeReport(), pb.RankFailure(log_tail="x" * 5000 + "the end"))
    assert told.failures[0].log_tail == ("x" * 5000 + "the end")[-4096:]


@pytest.mark.parametrize("letter", ["x", "é", "統", "\U0001f525"])
def test_the_longest_report_is_one_that_the_master_hears(letter: str) -> None:
    told = report(300, letter, 5000)
    assert told.ByteSize() > WHOLE
    one = with_failure(told, failed(MOST_SLOTS, letter, 5000)).ByteSize() - told.ByteSize()
    longest = told.ByteSize() + (MOST_SLOTS - 300) * one
    assert longest < MAX_REQUEST - (1 << 18), "a Hello holds more than the report"
    assert told.failures[0].message.strip(letter) == ""

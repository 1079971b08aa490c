"""What `elasticctl why` says of a round's end."""

import json
from dataclasses import replace

import pytest

from elastic.master import events as ev
from elastic.master.account import Ending, chosen, document, endings, paragraph
from elastic.master.events import Event, NodeId
from elastic.master.recovery import Cause
from tests.master.builders import (
    BUG,
    CLOSED,
    KILLED,
    Core,
    detached,
    failed,
    failure,
    finished,
    knocked,
    running,
    spare,
)


def accounts(core: Core, *fed: tuple[Event, float]) -> list[Ending]:
    """Of what is fed to a job, from how it stands now."""
    before, policy = core.job, core.policy
    for event, at in fed:
        core.feed(event, at)
    return endings(before, fed, policy)


def test_a_bug_that_costs_a_restart() -> None:
    core = running("a", "b", max_restarts=2)
    (told,) = accounts(
        core, (failed("b", 1, CLOSED), 20.0), (failed("a", 1, failure(rank=0, exit_code=1,
            error_type="ValueError", message="bad value 17", frame="train.py:3 in step",
            log_tail="epoch 3\nValueError: bad value 17\n")), 20.5),
    )  # fmt: skip
    assert core.seats() == ["a", "b"], core.reason()
    assert paragraph(document(told)) == (
        "Round 1 ended after 20.5 s: script error (certain). It began with rank 0 on a, at "
        "train.py:3 in step. It is told by 'ValueError: bad value 17'; 'epoch 3'. Its ranks were "
        "started again as round 2, 1 of 2 restarts left. What to do: correct the script."
    )
    found = document(told)
    assert (found["label"], found["node"], found["rank"]) == ("script_error", "a", 0)
    assert (found["next_round"], found["cause"], found["failed"]) == (2, "script error", True)


def test_a_job_that_failed() -> None:
    (told,) = accounts(running("a"), (failed("a", 1, BUG), 21.0))
    assert told.outcome == "failed"
    assert "The job failed: rank 0 on a raised ValueError: bad value 17" in paragraph(
        document(told)
    )
    assert document(told)["action"] == "correct the script"


def test_a_hang_names_the_rank_that_makes_it() -> None:
    hung = ev.Hung(
        round=1, ranks=(1,), nodes=(NodeId("b"),), place="data.py:7 in read", reason="rank 1 reads"
    )
    (told,) = accounts(running("a", "b"), (hung, 30.0))
    found = document(told)
    assert (found["label"], found["node"], found["rank"]) == ("peer_hung", "b", 1)
    assert found["evidence"] == ["rank 1 reads", "data.py:7 in read"]
    assert "started again as round 2" in paragraph(document(told))
    line = "NVRM: Xid (PCI:0000:03:00): 119, pid=7, Timeout waiting for RPC from GSP1!"
    (told,) = accounts(running("a", "b"), (replace(hung, kernel_log=(line,)), 30.0))
    found = document(told)
    assert (found["label"], found["node"], found["rank"]) == ("gpu_firmware", "b", 1)
    assert found["evidence"] == [line, "rank 1 reads", "data.py:7 in read"]


def test_what_a_nodes_kernel_recorded_is_the_evidence() -> None:
    """The others only say that their peer is gone; who was first to tell does not matter."""
    line = "NVRM: Xid (PCI:0000:03:00): 79, pid=0, GPU has fallen off the bus."
    device = failure(
        rank=1,
        exit_code=1,
        error_type="AcceleratorError",
        message="CUDA error: unspecified launch failure",
        kernel_log=(line,),
    )
    core = running("a", "b")
    (told,) = accounts(core, (failed("a", 1, CLOSED), 20.0), (failed("b", 1, device), 20.5))
    found = document(told)
    assert (found["label"], found["node"], found["rank"]) == ("gpu_lost", "b", 1)
    assert (found["cause"], found["confidence"]) == ("hardware", "certain")
    assert found["evidence"][0] == line
    assert core.seats() == ["a", "b"], "it cost a fault, and none of --max-restarts"


def test_a_lost_node() -> None:
    core = running("a", "b")
    (told,) = accounts(core, (detached("b"), 20.0), (knocked("b", ev.KnockAnswer.GONE), 20.1))
    found = document(told)
    assert (found["label"], found["node"], found["rank"]) == ("node_lost", "b", None)
    assert "the node itself on b" in paragraph(document(told))
    assert "faults left" in paragraph(document(told))


@pytest.mark.parametrize("heard_first", [True, False])
@pytest.mark.parametrize(
    ("code", "out_of_memory", "label"),
    [(128, False, "no_device"), (137, True, "cgroup_oom"), (137, False, "killed"), (None, False, "node_lost")],
)  # fmt: skip
def test_a_node_whose_container_ended(
    code: int | None, out_of_memory: bool, label: str, heard_first: bool
) -> None:
    """The cluster tells of it, before its agent is found to be gone or after."""
    removal = ev.Removal(
        node_id=NodeId("b"), cause=Cause.NODE_LOST, reason="pod b is gone", exit_code=code,
        out_of_memory=out_of_memory,
    )  # fmt: skip
    gone = (ev.Removed((removal,)), 20.2)
    lost = [(detached("b"), 20.0), (knocked("b", ev.KnockAnswer.GONE), 20.1)]
    (told,) = accounts(running("a", "b"), *([gone] if heard_first else [*lost, gone]))
    found = document(told)
    assert (found["label"], found["node"], found["rank"]) == (label, "b", None)
    if code is not None:
        words = f"the container of b exited with {code}"
        assert found["evidence"][0] == words + ", ended for want of memory" * out_of_memory


@pytest.mark.parametrize("code", [1, 2, 211])
def test_a_launcher_that_gives_its_own_code_was_not_ended(code: int) -> None:
    told = ev.Removal(
        node_id=NodeId("b"), cause=Cause.NODE_LOST, reason="it found no master", exit_code=code
    )
    lost = ((detached("b"), 20.0), (knocked("b", ev.KnockAnswer.GONE), 20.1))
    (one,) = accounts(running("a", "b"), *lost, (ev.Removed((told,)), 20.2))
    assert document(one)["label"] == "node_lost"


def test_what_is_taken_away_later_is_not_what_a_round_ended_of() -> None:
    core = running("a", "b", min_nodes=2)  # it waits for another one
    later = ev.Removal(node_id=NodeId("a"), cause=Cause.PREEMPTED, reason="preempted", exit_code=143)  # fmt: skip
    (one,) = accounts(
        core, (detached("b"), 20.0), (knocked("b", ev.KnockAnswer.GONE), 20.1), (ev.Removed((later,)), 80.0),
    )  # fmt: skip
    found = document(one)
    assert (found["label"], found["node"]) == ("node_lost", "b")


def test_nothing_failed() -> None:
    core = running("a")
    (asked,) = accounts(core, (ev.RestartAsked("new flags"), 20.0))
    assert not asked.failed
    assert "nothing failed: new flags" in paragraph(document(asked))
    spare(core)
    (done,) = accounts(core, (finished("a", 2), 40.0))
    assert "nothing failed" in paragraph(document(done))
    assert document(done)["label"] is None
    (drained,) = accounts(running("a"), (ev.DrainAsked(None, "maintenance"), 20.0))
    assert "nothing failed: drained: maintenance. The job was drained." in paragraph(
        document(drained)
    )


def test_a_verdict_about_thousands_of_ranks_is_cut() -> None:
    ranks = tuple(range(0, 20_000, 2))
    said = f"ranks {', '.join(map(str, ranks))} do not go on"
    hung = ev.Hung(round=1, ranks=ranks, nodes=(NodeId("b"),), place="a.py in f", reason=said)
    (told,) = accounts(running("a", "b"), (hung, 30.0))
    assert len(json.dumps(document(told))) < 8000, "the journal keeps no more of a note"
    assert document(told)["reason"].startswith("ranks 0, 2, 4")


def test_a_job_that_begins_anew_in_the_folder_of_one_that_failed() -> None:
    core = running("a", max_restarts=1)
    core.feed(failed("a", 1, BUG), 15.0)
    spare(core)
    told = accounts(core, (failed("a", 2, BUG), 20.0), (ev.MasterStarted("second"), 50.0))
    assert [(ending.round, ending.outcome) for ending in told] == [(2, "failed")]


def test_the_last_failure_is_told_unless_another_round_is_asked_for() -> None:
    core = running("a", "b", max_restarts=2)
    first = accounts(core, (failed("a", 1, KILLED), 20.0))
    spare(core)
    told = [*first, *accounts(core, (ev.RestartAsked("again"), 50.0))]
    assert [ending.round for ending in told] == [1, 2]
    documents = [document(ending) for ending in told]
    assert chosen(documents, None) is documents[0]
    assert chosen(documents, 2) is documents[1]
    assert chosen(documents, 9) is None
    assert chosen([], None) is None

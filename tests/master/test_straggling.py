"""A verdict about who holds a round up begins and ends, and where that pays the node is drained."""

from typing import Any

import pytest

from elastic.master import events as ev
from elastic.master.events import NodeId
from elastic.master.report import report
from elastic.master.state import TOLD
from tests.master.builders import Core, running, spare


def slow(node: str, rank: int = 1, **more: Any) -> ev.Straggling:
    told: dict[str, Any] = {
        "round": 1, "kind": "rank", "ranks": (rank,), "nodes": (NodeId(node),), "share": 0.2, "pays": True,
        "reason": f"rank {rank} on {node} computes\nlonger",
    }  # fmt: skip
    return ev.Straggling(**(told | more))


def excluding(*nodes: str, **policy: Any) -> Core:
    core = running(*nodes, exclude_straggler=True, **policy)
    core.feed(ev.Saving(1))
    return core


def test_it_is_told_while_it_stands() -> None:
    core = running("a", "b")
    assert core.feed(slow("b")).reason == "rank 1 on b computes longer"
    (told,) = report(core.job, 11.0)["stragglers"]
    assert (told["kind"], told["ranks"], told["nodes"]) == ("rank", [1], ["b"])
    before = core.job
    core.feed(slow("b"))
    assert core.job is before, "it is known"
    core.feed(slow("a", 0))
    assert core.feed(slow("b", over=True, reason="no longer: it")).reason == "no longer: it"
    assert [one["nodes"] for one in report(core.job, 12.0)["stragglers"]] == [["a"]]
    assert core.job.last_round == 1
    core.feed(ev.RestartAsked("by hand"))
    assert report(core.job, 13.0)["stragglers"] == [], "of the round before"


def test_of_another_round_it_says_nothing() -> None:
    core = running("a", "b")
    before = core.job
    core.feed(slow("b", round=2))
    core.feed(slow("b", over=True))
    assert core.job is before


def test_a_spare_takes_the_place_of_a_slow_node_at_the_end_of_a_step() -> None:
    core = excluding("a", "b", "c", max_nodes=2, min_nodes=2)
    said = core.feed(slow("b")).reason
    assert "b drains: rank 1 on b computes longer" in said
    assert core.order("b").kind == "run", "until all have saved"
    core.feed(ev.Met(1, 7))
    assert core.order("b").kind == "exit"
    assert core.seats() == ["a", "c"]
    assert core.restarts() == {"asked for": 1}


@pytest.mark.parametrize(
    ("verdict", "drained"),
    [
        ({"share": 0.4}, True),
        ({"share": 0.3}, False),  # a third of all ranks does more than that
        ({"share": 0.4, "pays": False}, False),
        ({"share": 0.4, "kind": "link"}, False),
        ({"share": 0.4, "nodes": (NodeId("z"),)}, False),
        ({"share": 0.4, "kind": "node"}, True),
    ],
)
def test_without_a_spare_it_goes_where_the_others_get_more_done(
    verdict: dict[str, Any], drained: bool
) -> None:
    core = excluding("a", "b", "c")
    core.feed(slow("b", **verdict))
    assert core.job.nodes[NodeId("b")].draining == drained


def test_a_rank_that_is_as_slow_elsewhere_costs_no_second_node() -> None:
    core = excluding(*"abcd", max_nodes=2, min_nodes=2)
    core.feed(slow("b"))
    core.feed(ev.Met(1, 7))
    spare(core)
    (other,) = set(core.seats()) - {"a"}
    core.feed(ev.Saving(2))
    said = core.feed(slow(other, round=2), 60.0).reason
    assert said.endswith("so they were on b: it is their work, not the node")
    core.tick(90.0)
    assert not core.job.nodes[NodeId(other)].draining
    core.feed(slow("a", 0, round=2))
    assert core.job.nodes[NodeId("a")].draining, "another rank is another thing"


def test_ranks_that_were_not_slow_on_another_node_are_not_known_as_slow() -> None:
    core = excluding(*"abcd", max_nodes=2, min_nodes=2)
    core.feed(slow("b"))
    core.feed(ev.Met(1, 7))
    spare(core)
    core.feed(ev.RestartAsked("by hand"), core.now + TOLD)
    spare(core)
    core.tick(core.now + 5.0)
    (other,) = set(core.seats()) - {"a"}
    core.feed(ev.Saving(core.job.last_round))
    core.feed(slow(other, round=core.job.last_round))
    assert core.job.nodes[NodeId(other)].draining


def test_who_comes_later_takes_its_place() -> None:
    core = excluding("a", "b", min_nodes=2, max_nodes=2)
    assert "nobody can take its place" in core.feed(slow("b", share=0.9)).reason
    core.attach("c")
    spare(core)
    assert core.job.nodes[NodeId("b")].draining
    core.feed(ev.Met(1, 7))
    assert core.seats() == ["a", "c"]


def test_no_round_becomes_too_small_and_that_is_said() -> None:
    core = excluding("a", "b", min_nodes=2)
    assert "nobody can take its place" in core.feed(slow("b", share=0.9)).reason
    assert not core.job.nodes[NodeId("b")].draining


def test_nobody_is_drained_unasked_or_while_another_is() -> None:
    core = running("a", "b", "c", max_nodes=2)
    core.feed(slow("b"))
    assert not core.job.nodes[NodeId("b")].draining
    core = excluding("a", "b", "c", "d", max_nodes=2)
    core.feed(slow("b"))
    core.feed(slow("a", 0))
    assert [n.node_id for n in core.job.nodes.values() if n.draining] == ["b"]
    core.feed(ev.Met(1, 7))
    spare(core)
    assert len(core.seats()) == 2

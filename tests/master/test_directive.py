"""What each node is told."""

from elastic.master import events as ev
from elastic.master.directive import Directive, Place, places
from elastic.master.job import DRAINED
from elastic.master.policy import Policy
from tests.master.builders import BUG, Core, attached, attachment, drain, failed, running, store


def test_places_number_nodes_ranks_and_roles() -> None:
    core = Core(Policy(min_nodes=3, max_nodes=3))
    core.feed(
        ev.Attached(
            (
                attachment("a", slots=2, role="trainer"),
                attachment("b", slots=3, role="reader"),
                attachment("c", slots=4, role="trainer"),
            )
        )
    )
    assert list(places(core.job.round).values()) == [
        Place(
            node_rank=rank,
            num_nodes=3,
            first_rank=first,
            local_world_size=local,
            world_size=9,
            role_first_rank=role_first,
            role_world_size=role_size,
        )
        for rank, first, local, role_first, role_size in (
            (0, 0, 2, 0, 6),
            (1, 2, 3, 0, 3),
            (2, 5, 4, 2, 6),
        )
    ]


def test_wait_run_and_exit() -> None:
    core = running("a", "b", min_nodes=2)
    order = core.order("b")
    assert core.job.round is not None
    assert (order.kind, order.round, order.store) == ("run", 1, core.job.round.store)
    assert core.order("stranger").kind == "wait"
    core.feed(drain("b"))
    assert core.order("a") == Directive(kind="wait", round=1, stop_grace=60.0)
    assert core.order("b") == Directive(
        kind="exit", round=1, exit_code=DRAINED, reason="drained", goes_on=True, stop_grace=60.0
    )


def test_where_the_last_node_is_drained_nobody_goes_on() -> None:
    alone = running("a", min_nodes=1)
    alone.feed(drain("a"))
    order = alone.order("a")
    assert (order.kind, order.goes_on) == ("exit", False)


def test_another_life_of_a_node_has_no_part_in_the_round() -> None:
    core = running("a", "b")
    seated = places(core.job.round)
    core.feed(attached("b", 2, store=""))
    assert core.job.last_round == 2
    assert seated.keys() == places(core.job.round).keys()
    assert core.order("b").round == 2


def test_nobody_has_a_place_in_a_broken_round() -> None:
    core = running("a")
    assert places(core.job.round)
    core.feed(failed("a", 1, BUG))
    assert core.order("a").kind == "exit"
    assert places(None) == {}


def test_restart_count_is_the_jobs() -> None:
    core = running("a", "b", "c", max_restarts=3)
    assert core.order("a").restart_count == 0
    core.feed(failed("a", 1, BUG))
    core.feed(ev.StoreReady("a", 1, "fresh"))  # type: ignore[arg-type]
    assert {core.order(node).restart_count for node in "abc"} == {1}


def test_a_node_hears_that_its_spare_store_is_spent() -> None:
    """Its round may be over before it heard of it: then nothing else would tell it."""
    core = Core(Policy(min_nodes=2, max_nodes=2))
    core.attach("a", store="a:1")
    core.attach("b")
    assert core.order("a").store == "a:1"
    core.feed(attached("b", 2))
    assert core.order("a") == Directive(kind="wait", round=1, store="a:1")
    core.feed(attached("a", store="a:1"))
    assert core.order("a").store == "a:1", "nor does attaching again make it new"
    core.feed(store("a", "a:2"))
    assert core.order("a").kind == "run"
    assert core.order("a").store == "a:2"

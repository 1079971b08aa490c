"""Nodes that are avoided: after proof, for a time, never too many."""

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.k8s.placing import Limits, Placing, blame, expire, leave, nodes

LIMITS = Limits(most="2", ttl=100.0, confirmations=2)


def test_one_failure_is_no_proof() -> None:
    once = blame(Placing(), "n1", "Crashed", "it crashed", 0.0, LIMITS)
    assert nodes(once, 8, 1.0, LIMITS) == ()
    twice = blame(once, "n1", "Crashed", "it crashed", 50.0, LIMITS)
    assert nodes(twice, 8, 51.0, LIMITS) == ("n1",)
    assert (
        nodes(blame(once, "n1", "Crashed", "it crashed", 150.0, LIMITS), 8, 151.0, LIMITS) == ()
    ), "forgotten"


def test_a_probe_is_proof_and_expires() -> None:
    state = blame(Placing(), "n1", "HardwareFault", "an Xid", 0.0, LIMITS, sure=True)
    assert nodes(state, 8, 99.0, LIMITS) == ("n1",)
    assert nodes(state, 8, 100.0, LIMITS) == ()
    assert expire(state, 100.0, LIMITS).avoided == ()


def test_a_job_that_avoids_nodes_no_more_forgets_them() -> None:
    state = blame(Placing(), "n1", "HardwareFault", "an Xid", 0.0, LIMITS, sure=True)
    state = blame(state, "n2", "Crashed", "it crashed", 0.0, LIMITS)
    assert expire(state, 1.0, Limits(most="0")) == Placing()


def test_shares_are_rounded_up() -> None:
    assert [Limits(most="10%").count(n) for n in (1, 10, 11, 0)] == [1, 1, 2, 0]
    assert Limits(most="0").count(100) == 0


def test_where_none_is_to_be_avoided_none_is_named() -> None:
    found = blame(Placing(), "n1", "HardwareFault", "an Xid", 0.0, Limits(most="0"), sure=True)
    assert found == Placing()


def test_no_place_is_nobodys_fault() -> None:
    assert blame(Placing(), "", "NodeLost", "lost", 0.0, LIMITS, sure=True) == Placing()


def test_no_more_nodes_are_left_than_may_be_avoided_and_each_once() -> None:
    state, going = leave(Placing(), {"p1": "n1", "p2": "n2", "p3": "n3"}, 8, 0.0, LIMITS)
    assert going == ("p1", "p2")
    assert leave(state, {"p3": "n3", "p4": "n1"}, 8, 1.0, LIMITS)[1] == (), "a rule sent p4 back"
    for node in ("n1", "n2"):
        state = blame(state, node, "HealthCheckFailed", "matmul", 2.0, LIMITS, sure=True)
    assert leave(state, {"p3": "n3"}, 8, 3.0, LIMITS)[1] == ()
    known = Placing(avoided=state.avoided)
    assert leave(known, {"p3": "n3"}, 8, 3.0, LIMITS)[1] == (), "the launcher has started anew"
    assert leave(state, {"p3": "n3"}, 8, 102.0, LIMITS)[1] == ("p3",)


def test_all_pods_leave_a_node_that_is_avoided() -> None:
    limits = Limits(most="1", ttl=100.0)
    state, going = leave(Placing(), {"p1": "n1", "p2": "n1"}, 8, 0.0, limits)
    assert going == ("p1",)
    state = blame(state, "n1", "HealthCheckFailed", "matmul", 1.0, limits, sure=True)
    assert leave(state, {"p2": "n1"}, 8, 2.0, limits)[1] == ("p2",)


def test_a_node_that_was_left_is_avoided_however_its_pod_ends() -> None:
    state, _ = leave(Placing(), {"p1": "n1"}, 8, 0.0, LIMITS)
    state = blame(state, "n1", "NodeLost", "nothing is heard of it", 4.0, LIMITS)
    assert nodes(state, 8, 5.0, LIMITS) == ("n1",)


def test_what_was_avoided_for_another_reason_leaves_room() -> None:
    limits = Limits(most="1", ttl=100.0)
    state = blame(Placing(), "n1", "NodeLost", "lost", 0.0, limits, sure=True)
    assert leave(state, {"p2": "n2"}, 8, 1.0, limits)[1] == ("p2",)


def test_where_no_node_is_avoided_none_is_left() -> None:
    for limits, node in ((Limits(most="0"), "n1"), (LIMITS, "")):
        assert leave(Placing(), {"p1": node}, 8, 0.0, limits) == (Placing(), ())


@settings(max_examples=60)
@given(
    told=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.floats(0, 50), st.booleans()), max_size=30
    ),
    most=st.integers(0, 4),
)
def test_never_more_than_the_most(told: list[tuple[str, float, bool]], most: int) -> None:
    limits, state, now = Limits(most=str(most), ttl=100.0), Placing(), 0.0
    for node, passed, sure in told:
        now += passed
        state = blame(state, node, "Crashed", "x", now, limits, sure=sure)
        found = nodes(state, 8, now, limits)
        assert len(found) <= most
        assert len(set(found)) == len(found)
        assert not sure or not most or node in {one.node for one in state.avoided}

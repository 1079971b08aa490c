"""Whatever is at fault: it is named, nobody else is, and what cannot be told is said to be undecided."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from elastic.master import grouping
from elastic.master.events import NodeId
from elastic.master.grouping import Group, Wanted
from elastic.master.pair_results import Account, Kind, Limits, Outcome, Test, link
from elastic.master.pairing import Found, Plan, Solo, decide, enough
from tests.sim.probed import World, names, probe, spoiled

A, B, C, D = names(4)
MANY = Limits(rounds=100)


def world(count: int, **faults: object) -> World:
    return World(labels=dict.fromkeys(names(count), ""), **faults)  # type: ignore[arg-type]


def fine(world: World) -> dict[NodeId, Solo]:
    return dict.fromkeys(world.labels, Solo(found=Found.FINE))


def named(plan: Plan) -> set[tuple[Kind, tuple[NodeId, ...], int | None]]:
    return {(verdict.kind, verdict.nodes, verdict.gpu) for verdict in plan.verdicts}


def test_one_node_has_its_solo_verdict_only() -> None:
    plan = decide({A: ""}, {A: Solo(found=Found.FINE)}, [])
    assert not plan.groups
    assert not plan.verdicts
    assert "no two nodes" in plan.reason
    bad = decide({A: ""}, {A: Solo(found=Found.FAULTY, what="ECC errors", gpu=3)}, [])
    assert named(bad) == {(Kind.GPU, (A,), 3)}
    assert "GPU 3 of node n0000" in bad.reason


def test_who_is_faulty_alone_is_paired_with_nobody() -> None:
    plan = decide(dict.fromkeys(names(4), ""), {B: Solo(found=Found.FAULTY, what="no disk")}, [])
    assert B not in {node_id for group in plan.groups for node_id in group.nodes}
    assert named(plan) == {(Kind.NODE, (B,), None)}


def test_of_two_that_are_fine_alone_the_link_is_named() -> None:
    broken = world(2, dead_links={(A, B)})
    plan, rounds = probe(broken, fine(broken))
    assert named(plan) == {(Kind.LINK, (A, B), None)}
    assert rounds == 2


def test_of_two_that_were_not_probed_alone_neither_is() -> None:
    plan, _ = probe(world(2, dead_links={(A, B)}))
    assert not plan.verdicts
    (one,) = plan.undecided
    assert (one.nodes, one.links) == ((A, B), ((A, B),))
    assert "undecided between node n0000, node n0001, the link" in plan.reason


def test_a_disturbance_of_two_nodes_is_no_fault() -> None:
    pair = world(2, dead_links={(A, B)})
    first = pair.run(decide(pair.labels, fine(pair), []).groups)
    pair.dead_links.clear()
    again = decide(pair.labels, fine(pair), [first])
    assert again.groups, "a link that failed once is tested again"
    plan = decide(pair.labels, fine(pair), [first, pair.run(again.groups)])
    assert not plan.groups
    assert not plan.verdicts
    assert not plan.undecided


@pytest.mark.parametrize("bad", [A, B, C])
@pytest.mark.parametrize("kind", ["dead", "slow"])
def test_of_three_the_bad_one_is_named(bad: NodeId, kind: str) -> None:
    faults = {"dead": {bad}} if kind == "dead" else {"slow_nodes": {bad: 2.0}}
    plan, rounds = probe(world(3, **faults))
    assert named(plan) == {(Kind.NODE, (bad,), None)}
    assert rounds <= 3


@pytest.mark.parametrize("bad", [(A, B), (A, C), (B, C)])
@pytest.mark.parametrize("kind", ["dead", "slow"])
def test_of_three_the_bad_link_is_named(bad: tuple[NodeId, NodeId], kind: str) -> None:
    """Between the two that are not in the first round's pairs, too, if it is slow beside them."""
    faults = {"dead_links": {bad}} if kind == "dead" else {"slow_links": {bad: 2.0}}
    plan, rounds = probe(world(3, **faults))
    assert named(plan) == {(Kind.LINK, bad, None)}
    assert rounds <= 3


def test_three_that_all_do_not_work_together_are_not_accused() -> None:
    cut = world(3, dead={A, B})
    plan, _ = probe(cut, fine(cut), MANY)
    assert not plan.verdicts
    assert set(plan.undecided[0].nodes) == {A, B, C}
    assert "no two of them work together" in plan.reason


def test_a_node_whose_partner_failed_alone_is_tested_with_another() -> None:
    plan, rounds = probe(world(4, gpus=8, broken_gpus={(A, 5)}, dead={B}))
    assert named(plan) == {(Kind.GPU, (A,), 5), (Kind.NODE, (B,), None)}
    assert rounds == 2


def test_one_slow_gpu_is_named_and_eight_are_a_node() -> None:
    slow = {(A, 2): 1.15} | {(C, gpu): 1.3 for gpu in range(8)}
    plan, rounds = probe(world(6, gpus=8, noise=0.005, slow_gpus=slow))
    assert named(plan) == {(Kind.GPU, (A,), 2), (Kind.NODE, (C,), None)}
    assert rounds == 2
    assert "1.15 times what is usual" in str(plan.verdicts[0])


def test_a_slow_link_is_told_from_a_slow_node() -> None:
    plan, _ = probe(world(8, slow_links={(A, B): 2.0}, slow_nodes={C: 2.0}))
    assert named(plan) == {(Kind.LINK, (A, B), None), (Kind.NODE, (C,), None)}


def test_longer_ways_between_racks_are_nobodys_fault() -> None:
    labels = {node_id: "left" if index < 5 else "right" for index, node_id in enumerate(names(9))}
    plan, _ = probe(World(labels=labels, far=3.0, dead={names(9)[8]}))
    assert named(plan) == {(Kind.NODE, (names(9)[8],), None)}


def test_neighbours_are_paired_first() -> None:
    labels = {node_id: "abc"[index % 3] for index, node_id in enumerate(names(9))}
    groups = decide(labels, {}, []).groups
    assert all(len({labels[node_id] for node_id in group.nodes}) == 1 for group in groups)
    assert sorted(len(group.nodes) for group in groups) == [3, 3, 3]


def test_who_is_tested_once_more_meets_others() -> None:
    """As in a tournament; of few nodes all."""
    few = world(6)
    _, rounds = probe(few, turn=1)
    assert (few.tested, rounds) == (set(combinations(names(6), 2)), 2)
    many = dict.fromkeys(names(20), "")
    assert met(many, 0) == set(zip(names(20)[::2], names(20)[1::2], strict=True))
    assert set.union(*(met(many, turn) for turn in range(19))) == set(combinations(names(20), 2))
    odd = [met(dict.fromkeys(names(21), ""), turn) for turn in range(3)]
    assert {len(one) for one in odd} == {11}
    assert len(set.union(*odd)) > 30


def met(labels: dict[NodeId, str], turn: int) -> set[tuple[NodeId, NodeId]]:
    return {link(*pair) for group in grouping.first(labels, turn) for pair in group.pairs}


def test_a_node_that_is_gone_counts_no_more() -> None:
    four = world(4, dead={B})
    first = four.run(decide(four.labels, {}, []).groups)
    left = {node_id: "" for node_id in four.labels if node_id != B}
    plan = decide(left, {}, [first])
    assert "1 suspect" in plan.reason
    assert B not in {node_id for group in plan.groups for node_id in group.nodes}


def test_more_suspects_than_good_nodes() -> None:
    """Good ones then serve several, also among so many nodes that not all are in one group."""
    ids = names(40)
    plan, _ = probe(world(40, dead=set(ids[::2][:15]) | set(ids[30:37])), limits=MANY)
    assert {verdict.nodes[0] for verdict in plan.verdicts} == {*ids[::2][:15], *ids[30:37]}


def test_what_rounds_do_not_suffice_for_is_undecided() -> None:
    plan, rounds = probe(world(64, dead={A}), limits=Limits(rounds=1))
    assert rounds == 1
    assert not plan.verdicts
    assert any(A in one.nodes for one in plan.undecided)
    assert "after 1 rounds" in plan.reason


def test_a_few_bad_links_do_not_make_a_node_guilty() -> None:
    """While links alone may be the reason, more good nodes are asked."""
    bad = world(64)
    bad.dead_links.update({(A, B), (A, C)})
    pairs = [Group(pairs=((a, b),)) for a, b in zip(names(64)[::2], names(64)[1::2], strict=True)]
    rounds = [bad.run(pairs), bad.run([Group(pairs=((A, C), (B, D)))])]
    plan = decide(bad.labels, {}, rounds, MANY)
    assert not plan.verdicts, "two good nodes that it does not work with are not enough"
    rounds.append(bad.run(plan.groups))
    assert not decide(bad.labels, {}, rounds, Limits(rounds=3)).reason.count("node n0000")


def test_a_link_that_failed_once_is_not_named() -> None:
    plan, _ = probe(world(64, dead_links={(A, B)}), limits=Limits(rounds=2))
    assert not plan.verdicts
    assert [one.links for one in plan.undecided] == [((A, B),)]
    assert "seen once" in plan.reason


def test_half_of_all_gpus_may_be_slow() -> None:
    slow = {(node_id, 0): 1.5 for node_id in names(8)[::2]}
    plan, _ = probe(world(8, noise=0.005, slow_gpus=slow))
    assert named(plan) == {(Kind.NODE, (node_id,), None) for node_id, _ in slow}


@pytest.mark.parametrize(("tested", "bad", "at_least"), [(30, 0, 3), (30, 2, 4), (3000, 150, 6)])
def test_the_more_links_are_bad_the_more_witnesses_it_takes(
    tested: int, bad: int, at_least: int
) -> None:
    """What the links of a healthy node are bad by chance with, in all that were tested: < 1e-4."""
    found = enough(tested, bad, 1e-4)
    assert found >= at_least
    assert 2 * tested * ((bad + 0.5) / (tested + 10)) ** found <= 1e-4


def test_pairs_of_a_group_take_turns() -> None:
    """Four suspects and two good nodes: nobody has two tests in a row while others have none."""
    ids = names(6)
    wanted = Wanted(suspects=dict.fromkeys(ids[:4], 2), again=(), slow_once=())
    (group,) = grouping.further(dict.fromkeys(ids, ""), ids[4:], wanted, (), 4)
    assert len(group.pairs) == 8
    for one, other in zip(group.pairs[::2], group.pairs[1::2], strict=True):
        assert not set(one) & set(other), group


@pytest.mark.parametrize(
    "bad", [{"rounds": 0}, {"star": 1}, {"matmul_ratio": 1.0}, {"risk": 0.0}, {"mads": 0.0}]
)
def test_limits_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Limits(**bad)  # type: ignore[arg-type]


def test_a_figure_of_one_side_is_enough() -> None:
    """The slower of the two accounts counts."""
    ids = names(20)

    def test(a: NodeId, b: NodeId, seconds: float) -> Test:
        passed = Account(node_id=a, outcome=Outcome.PASSED, gather=0.1)
        return Test(a=passed, b=Account(node_id=b, outcome=Outcome.PASSED, gather=seconds))

    pairs = list(zip(ids[::2], ids[1::2], strict=True))
    tests = [test(a, b, 0.3 if a == A else 0.1) for a, b in pairs]
    assert "2 suspects" in decide(dict.fromkeys(ids, ""), {}, [tests]).reason


# --- any number of nodes, any faults -----------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn, most: int = 64) -> World:
    """Any faults at all, and any racks."""
    count = draw(st.integers(1, most))
    ids = names(count)
    node = st.sampled_from(ids)
    some = st.sets(node, max_size=draw(st.sampled_from([1, 3, count])))
    gpus = draw(st.sampled_from([1, 2, 8]))
    gpu = st.tuples(node, st.integers(0, gpus - 1))
    links: Sequence[tuple[NodeId, NodeId]] = draw(
        st.lists(st.tuples(node, node), max_size=draw(st.sampled_from([0, 2, 5 * count])))
    )
    bad = [link(a, b) for a, b in links if a != b]
    half = draw(st.integers(0, len(bad)))
    racks = draw(st.integers(1, max(count // 3, 1)))
    return World(
        labels={one: f"rack{draw(st.integers(1, racks))}" if racks > 1 else "" for one in ids},
        gpus=gpus,
        dead=draw(some),
        slow_nodes=dict.fromkeys(draw(some), 2.5),
        broken_gpus=draw(st.sets(gpu, max_size=3)),
        slow_gpus=dict.fromkeys(draw(st.sets(gpu, max_size=3)), 1.6),
        dead_links=set(bad[:half]),
        slow_links=dict.fromkeys(bad[half:], 2.5),
        noise=0.01,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=150, deadline=None)
@given(worlds(), st.booleans(), st.integers(0, 5))
def test_whatever_is_wrong_nobody_healthy_is_accused(world: World, probed: bool, turn: int) -> None:
    """In three rounds, and what they do not tell of a failed test is said to be undecided."""
    plan, rounds = probe(world, fine(world) if probed else {}, turn=turn)
    event(f"{min(len(plan.verdicts), 5)} verdicts, {min(len(plan.undecided), 5)} undecided")
    assert rounds <= 3
    assert not world.wrong(plan.verdicts), plan.reason
    nodes = {verdict.nodes[0] for verdict in plan.verdicts if verdict.kind is not Kind.LINK}
    nodes |= {node_id for one in plan.undecided for node_id in one.nodes}
    links = {verdict.nodes for verdict in plan.verdicts}
    links |= {which for one in plan.undecided for which in one.links}
    failed = {w for w in world.tested if w in world.dead_links or world.dead & set(w)}
    assert not {w for w in failed if not nodes & set(w) and w not in links}, plan.reason


@st.composite
def mild(draw: st.DrawFn) -> World:
    """At most a third of the nodes is bad, and a healthy one has at most one bad link."""
    count = draw(st.integers(4, 64))
    ids = draw(st.permutations(names(count)))
    bad = ids[: draw(st.integers(0, count // 3))]
    kinds = [draw(st.sampled_from(["dead", "slow", "broken", "slow gpu"])) for _ in bad]
    of = {k: [n for n, kind in zip(bad, kinds, strict=True) if kind == k] for k in set(kinds)}
    rest = ids[len(bad) :]
    pairs = [link(a, b) for a, b in zip(rest[::2], rest[1::2], strict=False)]
    links = pairs[: draw(st.integers(0, max((len(rest) - 3) // 2, 0)))]
    half = draw(st.integers(0, len(links)))
    return World(
        labels=dict.fromkeys(names(count), ""),
        gpus=8,
        dead=set(of.get("dead", ())),
        slow_nodes=dict.fromkeys(of.get("slow", ()), 2.5),
        broken_gpus={(node_id, 3) for node_id in of.get("broken", ())},
        slow_gpus={(node_id, 1): 1.4 for node_id in of.get("slow gpu", ())},
        dead_links=set(links[:half]),
        slow_links=dict.fromkeys(links[half:], 2.5),
        noise=0.01,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=150, deadline=None)
@given(mild(), st.integers(0, 5))
def test_what_can_be_told_is_named(world: World, turn: int) -> None:
    """With as many rounds as that takes."""
    plan, rounds = probe(world, fine(world), MANY, turn)
    assert not world.wrong(plan.verdicts), plan.reason
    assert not world.missed(plan.verdicts), plan.reason
    assert rounds < MANY.rounds


# --- the reach: 2 to 4,096 nodes, 1 to 5 % ------------------------------------------------------------

SIZES = [2, 3, 4, 5, 7, 8, 16, 33, 64, 256, 1024, 4096]
SHARES = [(0.01, 0.0), (0.05, 0.0), (0.0, 0.01), (0.0, 0.05)]


def sweep(count: int, nodes: float, links: float, seeds: range) -> None:
    """All is named, but for one run in a hundred that ends before a suspect was tested often enough."""
    open_: list[str] = []
    for seed in seeds:
        world = spoiled(count, nodes, links, seed, racks=count // 16 if seed % 2 else 0)
        plan, rounds = probe(world, fine(world))
        assert rounds <= 3
        assert not world.wrong(plan.verdicts), f"seed {seed}: {plan.reason}"
        missed = world.missed(plan.verdicts)
        said = {(node_id,) for one in plan.undecided for node_id in one.nodes}
        assert missed <= said.union(*(one.links for one in plan.undecided)), (
            f"seed {seed}: nothing is said of some of {missed}: {plan.reason}"
        )
        if missed:
            open_.append(f"seed {seed}: {missed}")
    assert len(open_) <= len(seeds) / 100, open_


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("nodes", "links"), SHARES)
def test_sizes_and_shares(count: int, nodes: float, links: float) -> None:
    sweep(count, nodes, links, range(max(2, min(20, 1024 // count))))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("nodes", "links"), SHARES)
def test_sizes_and_shares_again_and_again(count: int, nodes: float, links: float) -> None:
    sweep(count, nodes, links, range(1000, 1000 + max(300, min(2000, 65536 // count))))


def test_clean_runs_accuse_nobody() -> None:
    """Times are disturbed now and then, and the ways between racks are longer."""
    for seed in range(200):
        world = spoiled(seed % 61 + 2, 0.0, 0.0, seed, racks=seed % 4)
        world.hiccups, world.far = 0.005, 2.0
        plan, _ = probe(world, fine(world))
        assert not plan.verdicts, f"seed {seed}: {plan.reason}"

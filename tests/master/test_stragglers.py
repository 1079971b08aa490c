"""Slow ranks, nodes and links are named, since when and at what cost; where nothing is slow, nobody is."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.master.intervals import Report, Seat, Times
from elastic.master.robust import LEAST, WINDOW
from elastic.master.stragglers import SETTLING, Decision, Policy, State, Verdict, decide
from elastic.master.transfers import Group, taken_in
from tests.master.straggling import STEPS, Job, found

SLOW_SINCE = 12


def last(job: Job, policy: Policy | None = None) -> Decision:
    *_, decision = job.decisions(policy)
    return decision


# --- nobody is accused wrongly, and who is slow is found -------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "stages", "runs"), [(8, 1, 200), (64, 4, 40), (1024, 8, 2), (10_000, 1, 1)]
)
def test_nobody_is_named_in_clean_runs(ranks: int, stages: int, runs: int) -> None:
    named = {
        seed: who
        for seed in range(runs)
        if (who := found(Job(ranks=ranks, stages=stages, seed=seed))[1])
    }
    assert named == {}


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [4, 16, 64, 1024, 10_000])
def test_nobody_is_named_in_200_clean_runs_of_any_size(ranks: int) -> None:
    named = {
        seed: who
        for seed in range(1000, 1200)
        if (who := found(Job(ranks=ranks, stages=1 + seed % 2, seed=seed))[1])
    }
    assert named == {}


@pytest.mark.parametrize(("more", "intervals"), [(0.10, 15), (0.20, 7), (1.0, 3)])
@pytest.mark.parametrize(("ranks", "runs"), [(8, 20), (64, 10), (1024, 2)])
def test_a_slow_rank_is_found_and_nobody_else(
    ranks: int, runs: int, more: float, intervals: int
) -> None:
    """10 % in 5 intervals, most often: then most of the window is slow."""
    took = []
    for seed in range(runs):
        rank = seed * 7919 % ranks
        job = Job(ranks=ranks, seed=seed, slow=((rank, more),), since=SLOW_SINCE, intervals=30)
        when, named = found(job)
        assert named == {(rank,)}, seed
        assert when is not None
        took.append(when)
    assert max(took) <= intervals, took
    assert sorted(took)[len(took) // 2] <= LEAST + 2, took


@pytest.mark.soak
def test_one_of_ten_thousand_is_found_each_time() -> None:
    for seed in range(20):
        rank = seed * 7919 % 10_000
        job = Job(ranks=10_000, seed=seed, slow=((rank, 0.1),), since=SLOW_SINCE, intervals=24)
        assert found(job)[1] == {(rank,)}, seed


def test_stages_that_compute_longer_are_not_slow_and_a_rank_of_a_stage_is() -> None:
    """It is the last stage that computes longest; the rank is of another one, and still waits for it."""
    job = Job(ranks=32, stages=4, slow=((6, 0.2),), since=SLOW_SINCE)
    (verdict,) = last(job).verdicts
    assert (verdict.kind, verdict.ranks) == ("rank", (6,))


def test_who_is_slow_from_the_first_step_on_is_found() -> None:
    when, named = found(Job(slow=((3, 0.1),)))
    assert named == {(3,)}
    assert when == SETTLING + LEAST


# --- what is said ----------------------------------------------------------------------------------


def test_since_when_by_how_much_and_at_what_cost() -> None:
    (verdict,) = last(Job(ranks=64, slow=((5, 0.3),), since=SLOW_SINCE)).verdicts
    assert verdict.since.step == SLOW_SINCE * STEPS
    assert verdict.behind == pytest.approx(0.3, abs=0.05)
    # A rank computes for 1.6 s, the slowest of 63 others about 2 % longer.
    assert verdict.cost == pytest.approx(1.6 * 0.28, rel=0.2)
    assert verdict.share == pytest.approx(verdict.cost / (1.6 * 1.3 + 0.1), rel=0.1)
    assert "rank 5 on n0 computes " in str(verdict)
    assert f"longer than its peers, since step {SLOW_SINCE * STEPS}: " in str(verdict)


def test_a_slow_rank_waits_least_and_that_is_no_slow_link() -> None:
    job = Job(ranks=16, a_node=4, stages=2, slow=((4, 1.0),), since=SLOW_SINCE)
    times = [report.times for _, report in job.reports()][-1]
    assert min(times, key=lambda rank: times[rank].waiting) == 4
    assert {one.kind for decision in job.decisions() for one in decision.verdicts} == {"rank"}


@pytest.mark.parametrize("ranks", [8, 16])
def test_all_ranks_of_a_node_are_the_node(ranks: int) -> None:
    """Also where it has half of all ranks: then the faster half is right."""
    slow = tuple((rank, 0.1) for rank in range(4, 8))
    decision = last(Job(ranks=ranks, a_node=4, slow=slow, since=SLOW_SINCE, seed=5))
    (verdict,) = decision.verdicts
    assert (verdict.kind, verdict.ranks, verdict.nodes) == ("node", (4, 5, 6, 7), ("n1",))
    assert "all 4 ranks on n1 compute" in decision.reason


def test_two_of_different_cost_are_told_in_its_order() -> None:
    job = Job(ranks=64, a_node=4, slow=((5, 0.12), (40, 0.4)), since=SLOW_SINCE)
    assert [one.ranks for one in last(job).verdicts] == [(40,), (5,)]


def test_acting_pays_only_where_enough_is_left() -> None:
    job = Job(slow=((3, 0.2),), intervals=20)
    assert last(job).verdicts[0].pays
    assert not last(job, Policy(horizon=100.0)).verdicts[0].pays
    assert not last(job, Policy(restart=3600.0)).verdicts[0].pays
    assert "a restart would cost more" in last(job, Policy(restart=3600.0)).reason


def test_who_is_as_fast_as_others_again_is_no_longer_named() -> None:
    job, state, named = Job(slow=((3, 0.3),), intervals=60), State(), []
    clean = dict(enumerate(Job(intervals=60).reports()))
    for number, (now, report) in enumerate(job.reports()):
        report = report if number < 20 else replace(clean[number][1], step=report.step)
        decision = decide(state, report, now, Policy())
        state = decision.state
        named.append(bool(decision.verdicts))
    assert named[19]
    assert not any(named[20 + WINDOW :])


# --- a device, or its host -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backward", "starved", "part", "said"),
    [
        (
            1.2,
            False,
            "device",
            "longer than its peers, on the device: its host is ahead of it, since",
        ),
        (1.0, False, "host", "longer than its peers, for the device waits for its host, since"),
        (1.2, True, "host", "for the device waits for its host"),
    ],
)
def test_a_slow_device_is_told_from_a_slow_host(
    backward: float, starved: bool, part: str, said: str
) -> None:
    """backward: how many times as long the slow rank's is."""
    state, decision = State(), None
    for now, report in Job(slow=((3, 0.2),), intervals=20).reports():
        times = {
            rank: replace(one, backward=0.6 * (backward if rank == 3 else 1.0), starved=starved)
            for rank, one in report.times.items()
        }
        decision = decide(state, replace(report, times=times), now, Policy())
        state = decision.state
    assert decision is not None
    (verdict,) = decision.verdicts
    assert (verdict.ranks, verdict.part) == ((3,), part)
    assert said in str(verdict)


@pytest.mark.parametrize(("share", "part"), [(0.6, "device"), (0.0, "host")])
def test_a_part_is_named_by_what_it_was_before_where_peers_become_faster(
    share: float, part: str
) -> None:
    """By 10 %, as devices at their limit of power do that have to wait. share: of what is more, in the backward pass."""
    job, state, named = Job(slow=((3, 0.08),), since=SLOW_SINCE, intervals=30), State(), []
    for number, (now, report) in enumerate(job.reports()):
        times = {}
        for rank, one in report.times.items():
            late = number >= SLOW_SINCE
            faster = 0.9 if late and rank != 3 else 1.0
            more = share * 0.08 * one.compute / 1.08 if late and rank == 3 else 0.0
            backward = 0.6 * faster + more
            times[rank] = replace(one, compute=faster * one.compute, backward=backward)
        decision = decide(state, replace(report, times=times), now, Policy())
        state = decision.state
        named += [(one.ranks, one.part) for one in decision.verdicts]
    assert set(named) == {((3,), part)}


def test_a_gpu_is_found_though_another_becomes_faster_for_it_waits() -> None:
    """Recorded on 4 H200s: milliseconds of each rank's steps, by interval of 2 s. Another process makes GPU 1 10 %
    slower from step 1297 on, and then GPU 3, which is at its limit of power else, is 11 % faster."""
    lines = (Path(__file__).parent / "slow_gpu.jsonl").read_text().splitlines()
    seats = {rank: Seat(node="n0", peers="", group="") for rank in range(4)}
    state, named = State(), []
    for number, line in enumerate(map(json.loads, lines), 1):
        columns = zip(line["compute"], line["backward"], line["waiting"], strict=True)
        times = {
            rank: Times(compute=compute, backward=backward, waiting=waiting, least=nan)
            for rank, (compute, backward, waiting) in enumerate(columns)
        }
        report = Report(round=1, step=line["step"], seats=seats, times=times)
        decision = decide(state, report, 2.0 * number, Policy())
        state = decision.state
        named += [(line["step"], one.ranks, one.part) for one in decision.verdicts]
    assert {(ranks, part) for _, ranks, part in named} == {((1,), "device")}
    assert named[0][0] <= 1297 + 6 * 108


def test_of_host_times_no_part_is_told() -> None:
    (verdict,) = last(Job(slow=((3, 0.2),), intervals=20)).verdicts
    assert verdict.part == ""
    assert "longer than its peers, since" in str(verdict)


@pytest.mark.parametrize("ranks", [64, 512])
@pytest.mark.parametrize(
    ("device", "host"),
    [(0.03, 0.0), (0.0, 0.4)],
    ids=["their power is less", "their storage is slow"],
)
def test_gpus_that_all_become_unlike_one_another_are_no_stragglers(
    ranks: int, device: float, host: float
) -> None:
    """From some step on, and for good: all are a tenth slower, by a deviation of `device`; or data come late, by up to
    `host` of a step, to each by its own."""
    wrong = 0
    for seed in range(2):
        random = np.random.default_rng(seed)
        slower = np.maximum(1.0, 1.1 + device * random.standard_normal(ranks))
        later = host * random.random(ranks)
        state = State()
        for number, (now, report) in enumerate(
            Job(ranks=ranks, seed=seed, lasting=0.004).reports()
        ):
            times = {}
            for rank, one in report.times.items():
                work = one.compute * float(slower[rank] if device and number >= 20 else 1.0)
                late = one.compute * float(later[rank]) if number >= 20 else 0.0
                times[rank] = replace(one, compute=work + late, backward=0.6 * work)
            decision = decide(state, replace(report, times=times), now, Policy())
            state = decision.state
            wrong += bool(decision.verdicts)
    assert not wrong


# --- links -----------------------------------------------------------------------------------------


def linked(*groups: tuple[str, ...], slow: tuple[int, ...], more: float = 0.3) -> Decision:
    """Of a job with such groups of nodes, a rank on each; `slow` ones take `more` seconds from some moment on."""
    seats, state, number = {}, State(), 0
    for name, nodes in enumerate(groups):
        for node in nodes:
            seats[number] = Seat(node=node, peers="", group=str(name))
            number += 1
    for interval in range(30):
        late = {str(name) for name in slow} if interval >= SLOW_SINCE else set()
        times = {
            rank: Times(
                compute=1 + rank % 3 * 0.003,
                waiting=0.1 + more * (seat.group in late),
                least=0.1 + more * (seat.group in late) + interval % 4 * 0.001,
            )
            for rank, seat in seats.items()
        }
        report = Report(round=1, step=interval + 1, seats=seats, times=times)
        decision = decide(state, report, float(interval), Policy())
        state = decision.state
    return decision


@pytest.mark.parametrize(
    ("groups", "slow", "ends"),
    [
        ([("a", "b"), ("b", "c"), ("c", "a")], (0,), ("a", "b")),
        ([("a", "b"), ("b", "c"), ("c", "a")], (0, 1), ("b",)),
        ([("a", "b", "c"), ("b", "c", "d"), ("a", "b", "d")], (0, 1), ("b", "c")),
        ([("a", "b", "c"), ("a", "b"), ("a", "c")], (0,), ("b", "c")),
        ([("a",), ("b",)], (1,), ("b",)),
    ],
)
def test_the_link_that_only_slow_groups_have_is_named(
    groups: list[tuple[str, ...]], slow: tuple[int, ...], ends: tuple[str, ...]
) -> None:
    (verdict,) = linked(*groups, slow=slow).verdicts
    assert (verdict.kind, verdict.nodes) == ("link", ends)
    assert verdict.since.step == SLOW_SINCE
    assert verdict.cost == pytest.approx(0.3, abs=0.01)
    assert {int(one) for one in verdict.ranks} == {
        rank
        for rank, group in enumerate(name for name, nodes in enumerate(groups) for _ in nodes)
        if group in slow
    }


def test_of_a_ring_over_many_nodes_no_link_is_named() -> None:
    decision = linked(("a", "b", "c", "d"), slow=(0,))
    (verdict,) = decision.verdicts
    assert (verdict.kind, verdict.nodes) == ("communication", ())
    assert "times do not tell which link it is" in decision.reason


@pytest.mark.parametrize("seed", range(40))
def test_a_node_without_processors_sends_late_too_and_is_no_slow_link(seed: int) -> None:
    """As of a quota: its transfers are seen to be slow before its compute is known to be."""
    job = Job(
        ranks=4, a_node=2, slow=((0, 0.12), (1, 0.12)), slow_groups=(("stage 0", 0.3),),
        since=SLOW_SINCE, seed=seed,
    )  # fmt: skip
    kinds = {one.kind for decision in job.decisions() for one in decision.verdicts}
    assert "node" in kinds
    assert "link" not in kinds


@pytest.mark.parametrize("seed", range(40))
def test_a_slow_link_is_named_within_a_window(seed: int) -> None:
    job = Job(ranks=4, a_node=2, slow_groups=(("stage 0", 0.3),), since=SLOW_SINCE, seed=seed)
    decisions = list(job.decisions())
    named = [{one.kind for one in decision.verdicts} for decision in decisions]
    assert set().union(*named) == {"link"}
    assert all(named[SLOW_SINCE + WINDOW :])


def test_of_transfers_that_are_told_no_more_nothing_is_said() -> None:
    """A script that begins to send and receive has stages, whose transfers are not looked at."""
    job = Job(ranks=4, a_node=2, slow_groups=(("stage 0", 0.3),), since=SLOW_SINCE)
    state, verdicts = State(), tuple[Verdict, ...]()
    for now, report in job.reports():
        if now > 50.0 and verdicts:
            times = {rank: replace(one, least=nan) for rank, one in report.times.items()}
            report = replace(report, times=times)
        decision = decide(state, report, now, Policy())
        state, verdicts = decision.state, decision.verdicts
    assert not verdicts


def test_transfers_that_are_a_little_slower_are_no_matter() -> None:
    assert linked(("a", "b"), ("c", "d"), slow=(0,), more=0.03).verdicts == ()


@given(
    st.integers(5, 20),
    st.lists(st.floats(0.0, 1.0), max_size=3),
    st.lists(st.floats(-0.01, 0.01), min_size=40, max_size=40),
)
@example(before=5, between=[0.25, 0.5, 0.75], noise=[0.0] * 40)
def test_however_a_link_becomes_slow_it_is_seen(
    before: int, between: list[float], noise: list[float]
) -> None:
    """Intervals before, some in which it is not yet as slow as it will be, and after; the median of a window may be any."""
    group = Group()
    levels = [*(0.1,) * before, *(0.1 + part for part in sorted(between)), *(1.1,) * WINDOW]
    for level, off in zip(levels, noise, strict=False):
        group = taken_in(group, level + off, least=0.06, deviations=5.0)
    assert group.slow
    assert group.longer > 0.5


# --- odd reports -----------------------------------------------------------------------------------


def test_a_new_round_begins_anew() -> None:
    job, state = Job(slow=((3, 0.3),), intervals=20), State()
    for now, report in job.reports():
        state = decide(state, report, now, Policy()).state
    decision = decide(state, replace(report, round=2), now + 1, Policy())
    assert decision.verdicts == ()
    assert decision.state.behind == {}
    assert decision.reason == "the round has only begun"


def test_ranks_without_peers_are_not_judged_and_that_is_said() -> None:
    decision = last(Job(ranks=4, stages=4, slow=((2, 1.0),), since=SLOW_SINCE))
    assert [one for one in decision.verdicts if one.kind in ("rank", "node")] == []
    assert "4 ranks have no peers" in decision.reason


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_reports_are_taken_and_little_is_remembered(data: st.DataObject) -> None:
    """Missing ranks, and times that are 0 or huge; only who told of times is named."""
    number = st.floats(0, 1e6)
    ranks = data.draw(st.integers(1, 6))
    seats = {
        rank: Seat(
            node=data.draw(st.sampled_from("ab")), peers=data.draw(st.sampled_from("xy")),
            group=data.draw(st.sampled_from("pq")),
        )
        for rank in range(ranks)
    }  # fmt: skip
    state, told = State(), set()
    for interval in range(data.draw(st.integers(1, 20))):
        there = data.draw(st.sets(st.integers(0, ranks - 1)))
        told |= there
        times = {
            rank: Times(
                compute=data.draw(number), waiting=data.draw(number), least=data.draw(number)
            )
            for rank in there
        }
        report = Report(round=1, step=interval, seats=seats, times=times)
        decision = decide(state, report, float(interval), Policy())
        state = decision.state
        assert decision.reason
        for one in decision.verdicts:
            assert set(one.ranks) & told
            assert one.cost >= 0
            assert str(one)
    assert all(len(window) <= WINDOW for window in state.behind.values())
    assert len(state.marks) <= WINDOW + 1
    assert set(state.groups) <= {seat.group for seat in seats.values()}


@given(st.floats(0.01, 1000.0), st.integers(0, 20))
@settings(max_examples=15, deadline=None)
def test_the_unit_of_time_does_not_matter(unit: float, seed: int) -> None:
    def named(factor: float) -> list[tuple[int, ...]]:
        state, who = State(), []
        for now, report in Job(seed=seed, slow=((2, 0.3),), intervals=14).reports():
            times = {
                rank: Times(compute=one.compute * factor, waiting=one.waiting * factor, least=one.least * factor)
                for rank, one in report.times.items()
            }  # fmt: skip
            decision = decide(state, replace(report, times=times), now, Policy())
            state = decision.state
            who.append(tuple(rank for one in decision.verdicts for rank in one.ranks))
        return who

    assert named(unit) == named(1.0)

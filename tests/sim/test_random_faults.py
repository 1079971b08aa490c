"""Any schedule of faults: the job ends or waits legally, and each restart has its right cause."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.master.job import DRAINED
from elastic.master.policy import Policy
from tests.sim.faults import Fault, Faults
from tests.sim.simulator import Simulation

NAMES = "abcdef"

KINDS = {
    "kill_rank": {"killed"},
    "script_error": {"script error"},
    "kill_agent": {"agent lost"},
    "kill_store": {"store lost"},
    "kill_launcher": {"node lost"},
    "lose_node": {"node lost"},
    "leave": {"node left"},
    "partition": {"node lost", "more nodes"},
    "restart_master": set[str](),
    "add_node": {"more nodes"},
    "drain": {"asked for"},
    "restart_job": {"asked for"},
}
"""Causes to which the restarts that a fault brings may be charged."""

MAY_HIDE_A_CAUSE = {"partition", "restart_master", "lose_node"}
"""What the master does not hear of, it knows only by what peers say: a broken connection."""

times = st.floats(0.2, 30.0).map(lambda t: round(t, 3))
schedules = st.lists(
    st.builds(
        Fault,
        at=times,
        kind=st.sampled_from(sorted(KINDS)),
        node=st.sampled_from(NAMES),
        seconds=st.sampled_from([0.3, 1.0, 3.0, 7.0, 12.0]),
        detail=st.just("ValueError"),
    ),
    max_size=10,
).map(lambda faults: Faults(tuple(sorted(faults, key=lambda f: f.at))))


any_job = given(
    faults=schedules,
    present=st.integers(1, 5),
    least=st.integers(1, 3),
    unit=st.sampled_from([1, 1, 2]),
    save_every=st.sampled_from([1, 5]),
    plain=st.booleans(),
    seed=st.integers(0, 3),
)


@settings(max_examples=100)
@any_job
def test_any_faults(**job: Any) -> None:
    play(**job)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None)
@any_job
def test_any_faults_for_long(**job: Any) -> None:
    play(**job)


def play(
    faults: Faults, present: int, least: int, unit: int, save_every: int, plain: bool, seed: int
) -> None:
    policy = Policy(
        min_nodes=least, max_nodes=4, node_unit=unit, max_restarts=100, same_failure_limit=100
    )
    job = Simulation(
        policy, NAMES[:present], faults, steps=25, save_every=save_every, plain=plain, seed=seed
    ).run(600.0)
    story = f"{faults}\n" + "\n".join(f"{t:8.3f} {reason}" for t, reason in job.reasons)

    kinds = {fault.kind for fault in faults.all}
    ledger = job.job.ledger
    elapsed = ledger.since - ledger.began
    assert abs(ledger.productive + sum(ledger.lost.values()) - elapsed) < 1e-6, story

    if job.exit_code is None:
        legal = min(job.here(), policy.max_nodes) // unit * unit
        assert legal < least, f"it waits, with {job.here()} nodes here\n{story}"
        assert not (job.job.round and job.job.round.standing), story
    elif job.exit_code == DRAINED:  # the last node that was left
        assert "drain" in kinds, story
    else:
        assert job.exit_code == 0, story
        assert job.step >= job.steps, story
        if not kinds & MAY_HIDE_A_CAUSE:
            assert job.job.round is not None
            done_before = not job.job.round.stepped  # and the word of it was on its way at the end
            assert ledger.step in (job.steps, job.steps - done_before), story
        assert not any(node.agent_up for node in job.fleet.values() if node.reachable()), story

    right = set[str]().union(*(KINDS[kind] for kind in kinds))
    if kinds & MAY_HIDE_A_CAUSE:
        right |= {"network", "node lost", "agent lost", "more nodes"}
    if kinds & {"kill_agent", "kill_launcher", "leave"}:  # back before anybody looked, or not
        right |= {"node lost", "agent lost"}
    if present > 1:  # the last call was over before the last of them came
        right |= {"more nodes"}
    assert set(job.restarts) <= right, story
    charged = {k: n for k, n in job.restarts.items() if k not in ("more nodes", "asked for")}
    assert sum(charged.values()) <= 2 * len(faults.all), f"one fault, many charges\n{story}"
    errors = sum(fault.kind == "script_error" for fault in faults.all)
    assert job.job.recovery.restarts <= errors, story

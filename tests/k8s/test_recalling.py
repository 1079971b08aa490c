"""What one launcher leaves for the next: by way of `status.job` it counts on as if nothing had been."""

import json
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic import supplied
from elastic.k8s import causes, recalling
from elastic.k8s.causes import Action, Rule, judge, remember
from elastic.k8s.observed import Pod
from elastic.k8s.placing import Limits, Placing, blame
from elastic.k8s.recalling import Recalled
from elastic.k8s.supply import Memory, Plan
from elastic.proto import elasticjob, schema
from elastic.proto.elasticjob import JobState, Past, PodFailure

BASE = JobState(generation=1, attempt=1, state="Running")
LIMITS = Limits(most="50%", ttl=100.0, confirmations=2)


def pod(slot: int = 0, attempt: int = 0, **more: object) -> Pod:
    name = f"j-worker-{slot}-r{attempt}"
    usual = Pod(name=name, uid=name, slot=slot, attempt=attempt, node="n", phase="Failed")
    return replace(usual, **more)  # type: ignore[arg-type]


def handed_on(pasts: dict[int, Past], placing: Placing, step: int = 0) -> Recalled:
    """As JSON, as the server has it."""
    state = replace(
        BASE,
        avoided_nodes=recalling.avoided(placing),
        remembered=recalling.remembered(pasts, step, placing),
    )
    found = elasticjob.job_state({"job": json.loads(json.dumps(schema.dump(state)))})
    return recalling.recalled(found)


@given(
    ends=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([1, 134, 137, 139]), st.booleans()),
        max_size=12,
    ),
    blamed=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_it_is_the_same_on_the_other_side(
    ends: list[tuple[int, int, bool]], blamed: list[tuple[str, bool]]
) -> None:
    pasts: dict[int, Past] = {}
    for attempt, (slot, code, oom) in enumerate(ends):
        past = pasts.get(slot, Past())
        ended = pod(slot, attempt, exit_code=code, ended="OOMKilled" if oom else "Error")
        pasts[slot] = remember(past, ended, judge(ended, past), 5)
    placing = Placing()
    for now, (node, sure) in enumerate(blamed):
        placing = blame(placing, node, "Crashed", "it crashed", float(now), LIMITS, sure=sure)
    found = handed_on(pasts, placing, 5)
    assert (found.pasts, found.placing, found.step) == (pasts, placing, 5)


def test_a_status_stays_small_and_keeps_what_matters_most() -> None:
    pasts = {n: Past(attempt=1, same=1, fingerprint="f" * 16) for n in range(10_000)}
    pasts[7_777] = Past(attempt=2, crashes=2, same=2, fingerprint="c" * 16)
    pasts[8_888] = Past(attempt=2, same=1, oom_step=4, fingerprint="o" * 16)
    placing = Placing()
    for number in range(60):
        placing = blame(placing, f"n{number}", "NodeLost", "gone", 0.0, LIMITS, sure=True)
        placing = blame(placing, f"s{number}", "Crashed", "x", 0.0, LIMITS)
    state = replace(
        BASE,
        avoided_nodes=recalling.avoided(placing),
        remembered=recalling.remembered(pasts, 0, placing),
    )
    assert len(json.dumps(schema.dump(state))) < 24_000
    assert {7_777, 8_888} <= {one.slot for one in state.remembered.slots}
    assert state.avoided_nodes[-1].node == "n59"
    assert state.remembered.suspected[-1].node == "s59"


def test_a_status_stays_small_at_its_worst() -> None:
    """Long names, long words, and none of them ASCII."""
    node, words = "n" * 253, "é" * causes.MOST_WORDS
    pasts = {n: Past(attempt=n, same=1, crashed_on=node, fingerprint="f" * 16) for n in range(999)}
    placing, found = Placing(), tuple[PodFailure, ...]()
    for number in range(99):
        name = f"{number:03}{node[3:]}"
        placing = blame(placing, name, "HealthCheckFailed", words, 1e9, LIMITS, sure=True)
        placing = blame(placing, f"s{name[1:]}", "Crashed", words, 1e9, LIMITS)
        one = PodFailure(
            time=1e9 + number, pod="p" * 253, node=name, cause="NodeLost", action="ReplacePod", reason=words,
        )  # fmt: skip
        found = recalling.failures((*found, one))
    plan = Plan(memory=Memory(), pending=tuple((f"p{n}", words) for n in range(99)))
    state = replace(
        BASE,
        message="é" * 1000,
        workers=supplied.workers(plan, words * 9),
        last_failures=found,
        avoided_nodes=recalling.avoided(placing),
        remembered=recalling.remembered(pasts, 0, placing),
    )
    assert len(json.dumps(schema.dump(state), ensure_ascii=False).encode()) < recalling.ROOM
    assert (found[-1].time, state.avoided_nodes[-1].node) == (1e9 + 98, f"098{node[3:]}")
    assert min(map(len, (found, state.avoided_nodes, state.remembered.slots))) > 4


@pytest.mark.parametrize("state", ["Suspending", "Suspended"])
def test_a_suspend_is_there_to_put_right_what_failed(
    state: Literal["Suspending", "Suspended"],
) -> None:
    placing = blame(Placing(), "n", "HardwareFault", "an Xid", 0.0, LIMITS, sure=True)
    remembered = recalling.remembered({0: Past(attempt=0, oom_step=4)}, 4, placing)
    nodes = recalling.avoided(placing)
    said = replace(BASE, state=state, remembered=remembered, avoided_nodes=nodes)
    found = recalling.recalled(said)
    assert found.pasts == {}
    assert found.placing == placing
    assert recalling.recalled(None) == Recalled()


def test_what_was_acted_on_is_counted_once_and_nothing_follows_from_it_again() -> None:
    rules = (Rule(name="all", exit_codes=(42,), action=Action.RESTART_JOB),)
    known = Recalled(pasts={0: Past(attempt=0, oom_step=3), 2: Past(attempt=0)}, step=3)
    pods = (
        pod(0, 0, ended="OOMKilled", exit_code=137),  # is counted
        pod(0, 1, phase="Running"),
        pod(1, 0, exit_code=134),  # is not, but was replaced
        pod(1, 1, exit_code=42),  # nor was this
        pod(2, 0, phase="Succeeded", exit_code=0),
    )
    found = recalling.memory(known, pods, {2: 5}, rules)
    assert found.judged == {"j-worker-0-r0", "j-worker-1-r0", "j-worker-2-r0"}
    assert found.done == {2}, "and not replaced"
    assert found.pasts[0] == known.pasts[0]
    assert (found.pasts[1].crashes, found.pasts[1].attempt) == (1, 0)
    assert (found.attempts, found.step) == ({2: 5}, 3)

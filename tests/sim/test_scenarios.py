"""What happens to a whole job, fault by fault."""

from typing import Any

import pytest

from elastic.master.job import DRAINED
from elastic.master.policy import Policy
from tests.sim.faults import Faults
from tests.sim.simulator import Simulation


def simulate(
    nodes: str,
    faults: Faults,
    *,
    least: int = 1,
    most: int | None = None,
    until: float = 1000.0,
    slots: int = 1,
    steps: int = 20,
    save_every: int = 1,
    plain: bool = False,
    **policy: Any,
) -> Simulation:
    names = nodes.split()
    asked = Policy(min_nodes=least, max_nodes=most or len(names), **policy)
    simulation = Simulation(
        asked, names, faults, steps=steps, slots=slots, save_every=save_every, plain=plain
    ).run(until)
    ledger = simulation.job.ledger
    assert ledger.productive + sum(ledger.lost.values()) == pytest.approx(
        ledger.since - ledger.began
    )
    return simulation


def test_nothing_goes_wrong() -> None:
    job = simulate("a b c", Faults())
    assert job.exit_code == 0
    assert job.job.last_round == 1
    assert not job.restarts
    assert job.now < 25


def test_a_killed_rank_costs_a_second() -> None:
    job = simulate("a b c", Faults().kill_rank(at=5, node="b"))
    assert job.exit_code == 0
    assert job.restarts == {"killed": 1}
    assert job.seats(2) == job.seats(1) == "a b c"
    (downtime,) = job.downtimes()
    assert downtime is not None
    assert downtime < 1.7, "stop, start and one step"


def test_steps_done_twice_are_lost_to_their_cause() -> None:
    job = simulate("a b", Faults().kill_rank(at=9.5, node="b"), save_every=5)
    assert job.job.ledger.lost["killed"] > 2
    assert job.job.ledger.step == 20


def test_shrink_and_go_on() -> None:
    job = simulate("a b c", Faults().lose_node(at=5, node="b"))
    assert job.exit_code == 0
    assert job.restarts == {"node lost": 1}
    assert job.seats(2) == "a c"
    lost_at = job.job.ledger.interruptions[0].at
    assert lost_at == pytest.approx(5 + 2.5 + 5.0, abs=0.01), "silence, then the lease"


def test_a_dead_launcher_is_known_at_once() -> None:
    job = simulate("a b c", Faults().kill_launcher(at=5, node="b"))
    assert job.job.ledger.interruptions[0].at == pytest.approx(5, abs=0.05)
    assert job.restarts == {"node lost": 1}


def test_a_preempted_node_says_so() -> None:
    job = simulate("a b c", Faults().leave(at=5, node="c"))
    assert job.exit_code == 0
    assert job.restarts == {"node left": 1}
    assert job.job.recovery.restarts == 0


def test_a_preempted_node_uses_its_grace_and_nobody_stops_for_it_twice() -> None:
    faults = Faults().leave(at=5, node="c", seconds=10)
    job = simulate("a b c", faults.restart_master(at=6), steps=30)
    assert job.exit_code == 0
    assert job.restarts == {"node left": 1}
    assert job.seats() == "a b"


def test_a_node_is_preempted_while_the_master_is_away() -> None:
    """Nobody can be told; it is lost by its silence, before its grace is over."""
    faults = Faults().restart_master(at=5, seconds=2).leave(at=6, node="c", seconds=30)
    job = simulate("a b c", faults, steps=40)
    assert job.exit_code == 0
    assert job.restarts == {"node lost": 1}
    assert job.seats() == "a b"
    assert job.job.ledger.interruptions[0].at < 20


def test_grow_when_nodes_come() -> None:
    job = simulate("a b", Faults().add_node(at=5, node="c").add_node(at=5.3, node="d"), most=4)
    assert job.exit_code == 0
    assert job.restarts == {"more nodes": 1}, "both in one round"
    assert job.seats() == "a b c d"


def test_others_do_not_stop_for_a_node_before_it_has_imported_torch() -> None:
    faults = Faults().add_node(at=5, node="c")
    stops = [
        simulate("a b", faults, most=3, plain=plain).job.ledger.interruptions[0].at
        for plain in (False, True)
    ]
    assert stops == [pytest.approx(5 + 1.0, abs=0.1), pytest.approx(5 + 3.0, abs=0.1)]


def test_a_waiting_spare_takes_the_place_at_once() -> None:
    job = simulate("a b c s", Faults().kill_launcher(at=5, node="b"), least=3, most=3)
    assert job.exit_code == 0
    assert job.seats(1) == "a b c"
    assert job.seats(2) == "a s c"
    (downtime,) = job.downtimes()
    assert downtime is not None
    assert downtime < 1.7


def test_an_agent_that_dies_comes_back_to_its_place() -> None:
    job = simulate("a b c", Faults().kill_agent(at=5, node="a"), least=3)
    assert job.exit_code == 0
    assert job.restarts == {"agent lost": 1}
    assert job.seats(2) == "a b c"


def test_a_short_partition_is_nothing() -> None:
    job = simulate("a b", Faults().partition(at=5, node="b", seconds=1.5))
    assert job.exit_code == 0
    assert job.job.last_round == 1


def test_a_partition_within_the_lease_is_nothing() -> None:
    job = simulate("a b", Faults().partition(at=5, node="a", seconds=6.5))
    assert job.exit_code == 0
    assert job.job.last_round == 1
    assert any("a is unreachable" in reason for _, reason in job.reasons)


def test_a_long_partition_costs_the_node_its_place_until_it_is_back() -> None:
    job = simulate("a b", Faults().partition(at=5, node="b", seconds=12), steps=40)
    assert job.exit_code == 0
    assert job.seats(2) == "a"
    assert job.seats(3) == "a b"
    assert job.restarts == {"node lost": 1, "more nodes": 1}


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_partition_and_the_store_of_a_round_that_was_never_heard_of(node: str) -> None:
    faults = Faults().partition(at=4.9, node=node, seconds=20).kill_rank(at=5, node="c")
    job = simulate("a b c", faults, steps=60)
    assert job.exit_code == 0


def test_below_min_waits_and_goes_on() -> None:
    faults = Faults().kill_launcher(at=5, node="b").add_node(at=300, node="x")
    job = simulate("a b", faults, least=2)
    assert job.exit_code == 0
    assert job.seats() == "a x"
    assert job.job.ledger.lost["node lost"] > 290


def test_below_min_for_too_long() -> None:
    faults = Faults().kill_launcher(at=5, node="b")
    job = simulate("a b", faults, least=2, below_min_timeout=60.0)
    assert job.exit_code == 1
    assert job.job.result is not None
    assert job.job.result.reason == "1 of at least 2 nodes here, for 60 s"
    assert job.now < 70


def test_whole_units_only() -> None:
    faults = (
        Faults().kill_launcher(at=5, node="c").add_node(at=12, node="x").add_node(at=20, node="y")
    )
    job = simulate("a b c d", faults, most=6, node_unit=2, steps=40)
    assert job.exit_code == 0
    assert [job.seats(n) for n in (1, 2, 3)] == ["a b c d", "a b", "a b d x"]


@pytest.mark.parametrize("at", [0.05, 0.101, 0.5, 1.2, 1.7, 5.0, 20.3])
def test_the_master_dies_and_training_never_notices(at: float) -> None:
    job = simulate("a b c", Faults().restart_master(at=at))
    assert job.exit_code == 0
    assert job.job.last_round == 1
    assert job.job.epoch == 2
    assert not job.restarts


def test_the_master_dies_in_the_middle_of_a_recovery() -> None:
    for delay in (0.001, 0.003, 0.01, 0.03, 0.06, 0.2, 0.55, 0.7, 1.5):
        faults = Faults().kill_rank(at=5, node="b").restart_master(at=5 + delay)
        job = simulate("a b c", faults)
        assert job.exit_code == 0, faults
        assert sum(job.restarts.values()) == 1, faults
        assert job.seats() == "a b c"


def test_the_master_dies_again_and_again() -> None:
    faults = Faults().kill_agent(at=6, node="b").kill_rank(at=12.2, node="c")
    for second in range(2, 20):
        faults = faults.restart_master(at=second, seconds=0.3)
    job = simulate("a b c", faults)
    assert job.exit_code == 0
    assert job.restarts.get("agent lost") == 1


def test_a_node_dies_with_the_master() -> None:
    faults = Faults().restart_master(at=5, seconds=2).kill_launcher(at=5.5, node="b")
    job = simulate("a b c", faults)
    assert job.exit_code == 0
    assert job.restarts == {"node lost": 1}
    assert job.job.ledger.interruptions[0].at < 9, "it is knocked at before its lease is over"


def test_a_second_fault_during_the_recovery_from_the_first() -> None:
    for delay in (0.001, 0.01, 0.05, 0.3, 0.6, 1.0):
        faults = Faults().kill_rank(at=5, node="b").kill_launcher(at=5 + delay, node="c")
        job = simulate("a b c", faults)
        assert job.exit_code == 0, faults
        assert job.seats() == "a b"
        assert sum(job.restarts.values()) <= 2


def test_followers_are_not_to_blame() -> None:
    faults = Faults().kill_rank(at=5, node="h").kill_rank(at=9.2, node="c")
    job = simulate("a b c d e f g h", faults, max_restarts=0)
    assert job.restarts == {"killed": 2}


def test_a_store_dies() -> None:
    job = simulate("a b", Faults().kill_store(at=5, node="a"))
    assert job.exit_code == 0
    assert job.restarts == {"store lost": 1}


def test_the_scripts_own_error_ends_the_job_as_in_torchrun() -> None:
    job = simulate("a b", Faults().script_error(at=5, node="b"))
    assert job.exit_code == 1
    assert job.job.result is not None
    assert job.job.result.reason == "rank 1 on b raised ValueError: bad at 5"
    assert not job.restarts
    assert all(not node.agent_up for node in job.fleet.values())


def test_a_deterministic_error_is_stopped_at_the_third() -> None:
    faults = Faults()
    for second in range(3, 200):
        faults = faults.script_error(at=second / 2, node="b")
    job = simulate("a b", faults, max_restarts=100)
    assert job.exit_code == 1
    assert job.job.recovery.restarts == 2
    assert "3 times" in job.reasons[-1][1]


def test_a_flapping_node_costs_the_others_one_restart() -> None:
    faults = Faults()
    for tick in range(100):
        faults = faults.kill_agent(at=3 + tick * 1.5, node="b")
    job = simulate("a b c", faults, most=4)
    assert job.exit_code == 0
    assert job.restarts == {"agent lost": 1}


def test_a_flapping_node_that_is_needed_cannot_hold_the_others_for_ever() -> None:
    faults = Faults()
    for tick in range(100):
        faults = faults.kill_agent(at=3 + tick * 1.5, node="b")
    job = simulate("a b c", faults, least=3, fault_budget=20)
    assert job.exit_code is not None
    rounds = job.job.last_round
    assert rounds > 10, "each life of it that came back was taken in"
    assert "too little progress" in job.reasons[-1][1]


def test_a_flapping_node_that_lets_others_step_never_ends_the_job() -> None:
    faults = Faults()
    for tick in range(40):
        faults = faults.kill_agent(at=5 + tick * 5, node="b")
    job = simulate("a b c", faults, fault_budget=3, steps=60)
    assert job.exit_code == 0


def test_a_node_drains_and_the_job_goes_on() -> None:
    job = simulate("a b c", Faults().drain(at=5, node="a"))
    assert job.exit_code == 0
    assert job.seats() == "c b"
    assert job.restarts == {"asked for": 1}
    assert not job.fleet["a"].guardian_up
    assert job.job.recovery.faults == 0


def test_a_job_drains() -> None:
    job = simulate("a b", Faults().drain_job(at=5))
    assert job.exit_code == DRAINED
    assert not any(node.guardian_up for node in job.fleet.values())


def test_a_restart_by_hand() -> None:
    job = simulate("a b", Faults().restart_job(at=5))
    assert job.exit_code == 0
    assert job.restarts == {"asked for": 1}


def test_a_node_comes_and_goes_while_it_cannot_be_used() -> None:
    faults = Faults()
    for second in range(3, 15):
        faults = faults.add_node(at=second, node="x").kill_launcher(at=second + 0.4, node="x")
    job = simulate("a b", faults, most=3)
    assert job.exit_code == 0
    assert not job.restarts


def test_200_nodes_lose_half_of_them_at_once() -> None:
    names = [f"n{i}" for i in range(200)]
    faults = Faults()
    for name in names[::2]:
        faults = faults.lose_node(at=5, node=name)
    job = simulate(" ".join(names), faults, steps=6)
    assert job.exit_code == 0
    assert job.restarts == {"node lost": 1}
    assert len(job.seats().split()) == 100


def test_200_nodes_fail_at_once() -> None:
    names = [f"n{i}" for i in range(200)]
    faults = Faults()
    for name in names:
        faults = faults.kill_rank(at=5, node=name)
    job = simulate(" ".join(names), faults, steps=6)
    assert job.exit_code == 0
    assert job.restarts == {"killed": 1}
    assert job.seats() == " ".join(names)

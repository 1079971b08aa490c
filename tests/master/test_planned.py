"""A planned end of a round: its ranks leave at the end of a step where they save, else at once."""

from elastic.master import events as ev
from elastic.master.events import KnockAnswer
from elastic.master.state import DRAINED
from tests.master.builders import BUG, KILLED, Core, detached, drain, failed, knocked, left, running

SLOW = ev.RestartAsked("by hand")


def saving(*nodes: str, **policy: object) -> Core:
    core = running(*nodes, **policy)  # type: ignore[arg-type]
    core.feed(ev.Saving(1))
    return core


def leaves(core: Core) -> bool:
    current = core.job.round
    return current is not None and current.standing and current.change is not None


def test_who_never_saves_is_stopped_at_once() -> None:
    core = running("a", "b")
    core.feed(SLOW)
    assert core.job.last_round == 2


def test_a_restart_waits_for_the_step_to_be_saved() -> None:
    core = saving("a", "b")
    core.feed(SLOW)
    assert leaves(core)
    assert core.order("a").kind == "run"
    assert core.order("a").round == 1
    core.feed(ev.Met(1, 7), at=11.0)
    assert core.job.last_round == 2
    assert core.restarts() == {"asked for": 1}
    assert core.order("a").stop_grace == core.policy.drain_timeout


def test_a_step_that_cannot_be_kept_is_not_waited_for() -> None:
    core = saving("a", "b")
    core.feed(SLOW)
    core.feed(ev.Met(1, 7, "no space"), at=11.0)
    assert core.job.last_round == 2


def test_the_time_of_a_drain_is_all_that_there_is() -> None:
    core = saving("a", "b", drain_timeout=8.0)
    core.feed(SLOW)
    assert core.wake() == 18.0
    core.feed(SLOW, at=15.0)
    core.tick(17.9)
    assert leaves(core), "asked for twice, it has no more time"
    core.tick(18.0)
    assert core.job.last_round == 2


def test_a_larger_world_waits_for_the_step_and_goes_on_if_nobody_comes_after_all() -> None:
    core = saving("a", max_nodes=2)
    core.attach("b")
    core.tick(11.0)
    assert leaves(core)
    core.feed(left("b"))
    assert not leaves(core)
    assert core.job.last_round == 1
    core.attach("c", at=12.0)
    core.tick(13.0)
    core.feed(ev.Met(1, 7))
    assert core.seats() == ["a", "c"]
    assert core.restarts() == {"more nodes": 1}


def test_a_node_that_drains_is_in_the_round_until_all_have_saved() -> None:
    core = saving("a", "b")
    core.feed(drain("b"))
    assert core.order("b").kind == "run"
    core.feed(ev.Met(1, 7))
    assert core.order("b").kind == "exit"
    assert core.seats() == ["a"]


def test_the_whole_job_drains() -> None:
    core = saving("a", "b")
    core.feed(drain(None))
    assert leaves(core)
    before = core.job
    core.feed(SLOW)
    assert core.job is before, "it ends; nothing takes the place of that"
    core.feed(ev.Met(1, 7))
    assert core.exit_code() == DRAINED
    core.feed(ev.MasterStarted("job", launch="another"))
    core.attach("a", at=20.0)
    core.tick(30.0)
    assert core.seats() == ["a"]
    assert not leaves(core)


def test_a_failure_does_not_wait_and_the_job_still_ends() -> None:
    core = saving("a", "b")
    core.feed(SLOW)
    core.feed(failed("a", 1, KILLED))
    assert core.job.last_round == 2
    assert not leaves(core)
    core = saving("a", "b")
    core.feed(drain(None))
    core.feed(failed("a", 1, KILLED))
    assert core.exit_code() == DRAINED
    core = saving("a", "b")
    core.feed(drain(None))
    core.feed(failed("a", 1, BUG))
    assert core.exit_code() == 1


def test_a_node_that_is_lost_ends_the_round_at_once() -> None:
    core = saving("a", "b")
    core.feed(SLOW)
    core.feed(detached("b"))
    assert leaves(core)
    core.feed(knocked("b", KnockAnswer.GONE))
    assert core.seats() == ["a"]
    assert not leaves(core)


def test_what_is_said_of_an_earlier_round_changes_nothing() -> None:
    core = saving("a")
    core.feed(SLOW)
    core.feed(ev.Met(1, 7))
    before = core.job
    core.feed(ev.Met(1, 7))
    core.feed(ev.Saving(1))
    assert core.job is before
    core.feed(ev.Met(2, 8))
    assert core.job is before, "nobody is to leave"

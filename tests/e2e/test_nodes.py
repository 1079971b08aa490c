"""Several nodes, on loopback unless a test says otherwise: they come, go, die, and lose sight of the master."""

import signal
from collections.abc import Callable
from functools import partial

import pytest

from tests.e2e.harness import Job, Node, processes
from tests.e2e.harness.proxy import Proxy


def test_nodes_join_while_others_train_and_leave_again(
    job: Job, start: Callable[..., Node]
) -> None:
    flags = ("--last-call", "0.2")
    start(*flags, nodes="1:3", nproc=1)
    first = job.wait_for_steps(1)
    second = start(*flags, nodes="1:3", nproc=1)
    grown = job.wait_for_steps(2, after=first)
    third = start(*flags, nodes="1:3", nproc=1)
    full = job.wait_for_steps(3, after=grown)
    third.signal(signal.SIGTERM)  # one leaves, and says so
    assert third.exit_code() == 1, job.dump()
    smaller = job.wait_for_steps(2, after=full)
    agent = second.agent()
    processes.kill(second.guardian, agent)  # another one vanishes
    job.wait_for_steps(1, after=smaller)
    job.finish()
    job.ends(0, -signal.SIGKILL, 1)
    assert {line.fields["world"] for line in job.told("start", round=full)} == {3}


def test_a_node_joins_during_a_round_that_is_forming(job: Job) -> None:
    """Three come at once, and one more while the ranks of a round are being started."""
    for _ in range(3):
        job.start("--last-call", "1", nodes="2:4", nproc=1)
    job.wait_for("ranks that start", lambda: job.told("start") or None)
    job.start("--last-call", "0.2", nodes="2:4", nproc=1)
    job.wait_for("four ranks in a round", lambda: _world(job, 4))
    job.finish()
    job.ends(0)


def _world(job: Job, size: int) -> bool | None:
    number = job.round()
    return all(job.told("step", round=number, rank=rank) for rank in range(size)) or None


def test_a_node_that_comes_while_the_job_ends(job: Job) -> None:
    """It is told so and starts nothing. The end lasts as long as a rank that ignores SIGTERM."""
    job.start("--drain-timeout", "8", nodes="1:2", nproc=1, script=("--on-term", "ignore"))
    number = job.wait_for_steps(1)
    job.ctl("drain")
    job.wait_for("the signal", lambda: job.told("term", round=number) or None)
    late = job.start("--rdzv-conf", "is_host=false", nodes="1:2", nproc=1)
    assert late.exit_code() == 213, job.dump()
    job.ends(213, 213)
    assert job.round() == number, job.dump()


def test_a_node_that_comes_when_the_job_is_over(job: Job) -> None:
    job.start(nodes="1:2", nproc=1)
    job.wait_for_steps(1)
    job.finish()
    job.ends(0)
    late = job.start("--join-timeout", "2", "--rdzv-conf", "is_host=false", nodes="1:2", nproc=1)
    job.ends(0, 1)
    assert "is elastic-run running on the node that owns it?" in late.said(), job.dump()


def test_a_spare_node_takes_the_place_of_one_that_dies(
    job: Job, start: Callable[..., Node]
) -> None:
    start(nodes="2:2", nproc=1).master()  # it has the master, and not the one that dies
    second = start(nodes="2:2", nproc=1)
    number = job.wait_for_steps(2)
    start(nodes="2:2", nproc=1)
    job.wait_for_event("node2 attached")
    job.wait_for_more_steps(number, 2)
    processes.kill(second.guardian, second.agent())
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0, -signal.SIGKILL, 0)


def test_others_train_on_while_a_node_gets_a_new_agent(job: Job) -> None:
    """Its ranks died with the agent. Torch is imported again before anybody stops for them."""
    flags = ("--last-call", "0.2")
    job.start(*flags, nodes="1:2", nproc=1, script=("--torch",))
    job.wait_for_steps(1)
    second = job.start(*flags, nodes="1:2", nproc=1, script=("--torch",))
    job.wait_for("both in one round", lambda: _world(job, 2) and job.told("start", rank=1))
    number = job.round()
    agent = second.agent()
    processes.kill(agent, job.rank(number, 1))
    alone = job.wait_for_steps(1, after=number)
    assert job.told("start", round=alone)[0].fields["world"] == 1, job.dump()
    grown = job.wait_for_steps(2, after=alone)
    assert grown == alone + 1, job.dump()
    job.finish()
    job.ends(0)


@pytest.mark.parametrize("start", ["auto", pytest.param("fork", marks=pytest.mark.soak)])
def test_a_node_that_waits_or_comes_back_starts_its_ranks_by_fork(job: Job, start: str) -> None:
    """It has imported torch by then, though no rank ever ran there; nobody stops for it before."""
    flags = ("--last-call", "0.1", "--preparation", "600", "--rank-start", start)
    job.start(*flags, nodes="1:2", nproc=1, script=("--torch",)).master()
    number = job.wait_for_steps(1)
    second = job.start(*flags, nodes="1:2", nproc=1, script=("--torch",))
    number = job.wait_for_steps(2, after=number)
    assert any("Prepared: round 2: 2 nodes" in event for event in job.events()), job.dump()
    third = job.start(*flags, nodes="1:2", nproc=1, script=("--torch",))
    job.wait_for("the third", lambda: "the standby is ready" in third.said() or None)
    processes.kill(second.guardian, second.agent())
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0, -signal.SIGKILL, 0)
    for node in (second, third):
        assert node.said().index("the standby is ready") < node.said().index("started by standby")
        assert "started by spawner" not in node.said(), job.dump()


def test_the_node_with_the_master_dies(job: Job) -> None:
    """The others say so in one line and end; they do not wait for ever."""
    first = job.start(nodes="2:2", nproc=1)
    first.master()
    flags = ("--rdzv-conf", "is_host=false", "--join-timeout", "3")
    second = job.start(*flags, nodes="2:2", nproc=1)
    number = job.wait_for_steps(2)
    _lose_with_its_master(first)
    job.wait_for_more_steps_of(number, 1)  # it does not depend on its peer, and goes on
    processes.kill(job.rank(number, 1))
    job.ends(-signal.SIGKILL, 1)
    assert "no master answers at" in second.said(), job.dump()


def _lose_with_its_master(node: Node) -> None:
    """Everything of it in one instant; ranks and starters go with their agent."""
    parts = (node.agent(), node.master(), node.guardian)
    processes.kill(node.guardian, number=signal.SIGSTOP)  # so that nobody is started again
    processes.kill(*parts)


def test_the_node_with_the_master_is_started_again(job: Job) -> None:
    """The same command goes on from the journal, with the node that trained on alone."""
    first = job.start(nodes="2:2", nproc=1)
    first.master()
    job.start(nodes="2:2", nproc=1)
    number = job.wait_for_steps(2)
    _lose_with_its_master(first)
    job.wait_for_more_steps_of(number, 1)
    job.start(nodes="2:2", nproc=1, name="node0")
    assert job.wait_for_steps(2, after=number) == number + 1, job.dump()
    assert any("master is back in epoch 2" in event for event in job.events()), job.dump()
    job.finish()
    job.ends(-signal.SIGKILL, 0, 0)


def test_a_launcher_dies_alone(job: Job) -> None:
    """Its agent says so and ends all that runs there; the others go on."""
    job.start(nodes="1:2", nproc=1).master()
    second = job.start(nodes="1:2", nproc=1, script=("--child",))
    job.wait_for("both in a round", lambda: _world(job, 2))
    number, agent = job.round(), second.agent()
    second.signal(signal.SIGKILL)
    job.wait_for_event("node1 left: its launcher died")
    job.wait_for_steps(1, after=number)
    job.wait_for("its agent's end", lambda: not processes.alive(agent) or None)
    job.finish()
    job.ends(0, -signal.SIGKILL)


def test_the_launcher_with_the_master_dies_alone(job: Job) -> None:
    """Its master, told by the kernel, ends the job; nobody waits for another one."""
    first = job.start(nodes="1:2", nproc=1, script=("--child",))
    first.master()
    second = job.start(nodes="1:2", nproc=1, script=("--child",))
    job.wait_for("both in a round", lambda: _world(job, 2))
    first.signal(signal.SIGKILL)
    assert [node.exit_code() for node in job.nodes] == [-signal.SIGKILL, 1], job.dump()
    last = second.said().splitlines()[-1]
    assert last == "elastic-run: the launcher on the master's node died", job.dump()
    job.nodes.clear()  # the first one's agent may take a moment longer
    job.assert_nothing_left(soon=True)


@pytest.mark.parametrize("seconds", [1, pytest.param(6, marks=pytest.mark.soak)])
def test_the_way_to_the_master_is_cut_and_ranks_go_on(job: Job, seconds: int) -> None:
    """Through a proxy, so it runs everywhere. The host itself still answers the master's knock."""
    with Proxy(job.address, job.port) as proxy:
        job.start(nodes="2", nproc=1)
        through = ("--rdzv-endpoint", f"127.0.0.1:{proxy.port}", "--rdzv-conf", "is_host=false")
        job.start(*through, nodes="2", nproc=1)
        number = job.wait_for_steps(2)
        proxy.cut()
        job.wait_for_event("node1 is unreachable")
        job.wait_for_more_steps(number, 2, count=50 * seconds)
        proxy.mend()
        job.wait_for("node1 to be back", lambda: "attached" in job.events()[-1] or None)
        job.wait_for_more_steps(number, 2)
        assert job.round() == number, job.dump()
        job.finish()
        job.ends(0)


def test_a_node_that_is_drained_and_cut_off_does_not_come_back(job: Job) -> None:
    """It would be taken into a round once more, while its ranks save."""
    with Proxy(job.address, job.port) as proxy:
        first = job.start("--lease", "2", nodes="1:2", nproc=1)
        first.master()
        through = ("--rdzv-endpoint", f"127.0.0.1:{proxy.port}", "--rdzv-conf", "is_host=false")
        hold = ("--on-term", "hold")
        second = job.start(*through, "--drain-timeout", "100", nodes="1:2", nproc=1, script=hold)
        job.wait_for("both in a round", lambda: _world(job, 2))
        number = job.round()
        job.ctl("drain", "node1")
        job.wait_for("its rank's signal", lambda: job.told("term", round=number, rank=1) or None)
        alone = job.wait_for_steps(1, after=number)
        proxy.cut()
        processes.kill(second.agent(), number=signal.SIGSTOP)  # so that no knock is answered
        job.wait_for_event("node1 is lost")
        processes.kill(second.agent(), number=signal.SIGCONT)
        proxy.mend()
        job.wait_for_more_steps(alone, 1, count=200)
        assert job.round() == alone, job.dump()
        job.finish()
        job.ends(0, 213)


def test_an_agent_that_is_stuck_for_a_while(job: Job) -> None:
    """Stopped, it answers nobody and its node is given up; once it goes on, it joins again."""
    node = job.start()
    number = job.wait_for_steps(2)
    agent = node.agent()
    processes.kill(agent, number=signal.SIGSTOP)
    job.wait_for_event("node0 is lost")
    processes.kill(agent, number=signal.SIGCONT)
    job.wait_for_steps(2, after=number)
    assert node.agent() == agent, job.dump()
    job.finish()
    job.ends(0)


def test_two_nodes_with_one_name(job: Job) -> None:
    """The second is turned away in one line; the first does not notice."""
    job.start(nodes="1:2", nproc=1)
    number = job.wait_for_steps(1)
    second = job.start("--node-id", "node0", nodes="1:2", nproc=1, name="other")
    assert second.exit_code() == 1, job.dump()
    assert "node0" in second.said().splitlines()[-1], second.said()
    job.wait_for_more_steps(number, 1)
    assert job.round() == number, job.dump()
    job.finish()
    job.ends(0, 1)


def test_a_node_that_leaves_is_not_taken_back_when_the_master_dies(job: Job) -> None:
    """Its ranks use their grace, and nobody stops for it a second time."""
    first, second, number = _one_may_leave(job)
    second.signal(signal.SIGTERM)
    job.wait_for_event("node1 left: its launcher got SIGTERM")
    job.wait_for("its rank's signal", lambda: job.told("term", rank=1) or None)
    alone = job.wait_for_steps(1, after=number)
    processes.kill(first.master())
    job.wait_for("node0 to be back", lambda: _attached_after(job, "epoch 2"))
    job.wait_for_more_steps(alone, 1, count=100)
    job.finish()
    job.ends(0, 1)
    assert job.round() == alone, job.dump()
    assert sum("node1 attached" in event for event in job.events()) == 1, job.dump()


def test_a_node_that_leaves_while_the_master_is_away(job: Job) -> None:
    """Nobody can be told. The others go on without it before its ranks' grace is over."""
    first, second, number = _one_may_leave(job)
    master = first.master()
    processes.kill(first.guardian, number=signal.SIGSTOP)  # so that no master is started again
    processes.kill(master)
    second.signal(signal.SIGTERM)
    job.wait_for("its rank's signal", lambda: job.told("term", rank=1) or None)
    processes.kill(first.guardian, number=signal.SIGCONT)
    alone = job.wait_for_steps(1, after=number)
    assert second.process.poll() is None, job.dump()
    job.finish()
    job.ends(0, 1)
    assert job.round() == alone, job.dump()


def test_who_is_told_to_end_just_after_another_gives_its_ranks_their_whole_grace(job: Job) -> None:
    """A cancelled job's launchers get their signals one by one; the first one's reaches the master.
    The store of their round stays, too."""
    flags = ("--shutdown-timeout", "100", "--last-call", "10", "--failure-grace", "4")
    start = partial(job.start, *flags, nodes="1:4", nproc=1, script=("--on-term", "hold"))
    first = start()
    first.master()
    second, third, fourth = start(), start(), start()
    number = job.wait_for_steps(4)
    ranks = [job.rank(number, rank) for rank in range(4)]
    third.signal(signal.SIGTERM)
    job.wait_for("the others' signals", lambda: len(job.told("term", round=number)) == 4 or None)
    for node in (second, first):
        node.signal(signal.SIGTERM)
    job.wait_for_steps(1, after=number)  # of who got no signal
    assert [processes.alive(rank) for rank in ranks] == [True, True, True, False], job.dump()
    fourth.signal(signal.SIGTERM)
    job.finish()
    job.ends(1)
    assert _saved(job, number) == {0: True, 1: True, 2: True}, job.dump()


def _one_may_leave(job: Job) -> tuple[Node, Node, int]:
    """Two nodes that train; ranks of the second hold out after a SIGTERM until the job's finish."""
    flags = ("--shutdown-timeout", "100", "--last-call", "0.2")
    first = job.start(*flags, nodes="1:2", nproc=1)
    first.master()
    job.wait_for_steps(1)
    second = job.start(*flags, nodes="1:2", nproc=1, script=("--on-term", "hold"))
    job.wait_for("both in a round", lambda: _world(job, 2) if job.round() > 1 else None)
    return first, second, job.round()


def _attached_after(job: Job, event: str) -> bool | None:
    events = job.events()
    back = next((i for i, line in enumerate(events) if event in line), None)
    return None if back is None else any("node0 attached" in e for e in events[back:]) or None


# --- the store of a round whose ranks use their grace ---


def _two_train(job: Job, first: str) -> tuple[Node, Node, int]:
    """Ranks of the second save after a SIGTERM, once they may; those of the first do what is said."""
    flags = ("--drain-timeout", "300", "--shutdown-timeout", "300")
    one = job.start(*flags, nodes="2", nproc=1, script=("--on-term", first))
    one.master()
    two = job.start(*flags, nodes="2", nproc=1, script=("--on-term", "hold"))
    number = job.wait_for_steps(2)
    one.part("elastic-store")
    return one, two, number


def _next(job: Job, number: int) -> int:
    """The round after `number`, once it has begun where rank 0 is."""
    after = number + 1
    job.wait_for("the next round", lambda: job.told("start", round=after, rank=0) or None)
    return after


def _saved(job: Job, number: int) -> dict[int, bool]:
    """Ranks of a round that have saved, and whether its store answered."""
    return {line.rank: line.fields["store"] for line in job.told("saved", round=number)}


def test_a_round_keeps_its_store_while_its_ranks_drain(job: Job) -> None:
    first, second, number = _two_train(job, "hold")
    job.ctl("drain", "node1")
    job.wait_for("both to have SIGTERM", lambda: len(job.told("term", round=number)) == 2)
    job.finish()
    assert second.exit_code() == 213, job.dump()
    first.signal(signal.SIGTERM)
    job.ends(1, 213)
    assert _saved(job, number) == {0: True, 1: True}, job.dump()


def test_a_round_keeps_its_store_while_the_next_one_begins(job: Job) -> None:
    _, _, number = _two_train(job, "die")
    job.ctl("restart")
    _next(job, number)
    job.finish()
    job.ends(0)
    assert _saved(job, number) == {1: True}, job.dump()


def test_the_next_round_needs_the_port_of_a_store_that_is_kept(job: Job) -> None:
    """With the least number of ports, two stores cannot be kept beside the one in use."""
    flags = ("--drain-timeout", "300")
    first = job.start(*flags, "--port-range", "30000-30003", nodes="2", nproc=1)
    first.master()
    job.start(*flags, nodes="2", nproc=1, script=("--on-term", "hold"))
    number = job.wait_for_steps(2)
    for _ in range(2):
        job.ctl("restart")
        number = _next(job, number)
    processes.kill(job.rank(number, 0))
    _next(job, number)
    job.finish()
    job.ends(0)


def test_a_drained_node_serves_its_store_until_ranks_elsewhere_have_saved(job: Job) -> None:
    """Its own are gone; and it does not stay for all of their time."""
    first, _, number = _two_train(job, "die")
    job.ctl("drain")
    job.wait_for("the store to stay", lambda: "ranks of other nodes still use" in first.said())
    job.wait_for("the signal", lambda: job.told("term", round=number, rank=1) or None)
    job.finish()
    job.ends(213)
    assert _saved(job, number) == {1: True}, job.dump()


def test_a_node_that_leaves_serves_its_store_until_ranks_elsewhere_have_saved(job: Job) -> None:
    """All launchers get a signal. The master is asleep, or it would stop whom it had not reached."""
    first, second, number = _two_train(job, "die")
    master = first.master()
    processes.kill(master, number=signal.SIGSTOP)
    first.signal(signal.SIGTERM)
    second.signal(signal.SIGTERM)
    job.wait_for("the store to stay", lambda: "ranks of other nodes still use" in first.said())
    job.wait_for("the signal", lambda: job.told("term", round=number, rank=1) or None)
    job.finish()
    assert second.exit_code() == 1, job.dump()
    processes.kill(master, number=signal.SIGCONT)
    job.ends(1)
    assert _saved(job, number) == {1: True}, job.dump()

"""Each part of a node dies in its turn: standby, starter, store, agent, guardian, master."""

import signal
import sys
from collections.abc import Callable, Sequence

import pytest

from elastic.agent import cgroup
from tests.e2e.harness import DEADLINE, FORK, SCRIPT, Job, Node, processes
from tests.e2e.harness.freezer import Freezer
from tests.e2e.harness.stuck import StuckFolder


def test_a_training_job_survives_one_fault_after_another(job: Job) -> None:
    """DDP over Gloo; each fault strikes the job that the one before has left."""
    node = job.start("--max-restarts", "0", script=("--torch", "--child"))
    agent, master = node.agent(), node.master()
    number = job.wait_for_steps(2, count=3)
    job.wait_for("the standby", lambda: "the standby is ready" in node.said() or None)

    # The standby: ranks go on, and another one is built.
    first = node.part("elastic-standby")
    processes.kill(first)
    job.wait_for("another standby", lambda: node.said().count("the standby is ready") == 2 or None)
    assert node.part("elastic-standby") != first
    job.wait_for_more_steps(number, 2)
    assert job.round() == number, job.dump()

    # A rank: the next ones are forked.
    processes.kill(job.rank(number, 1))
    number = job.wait_for_steps(2, after=number, count=3)
    assert "started by standby" in node.said(), job.dump()

    # The process that starts ranks by exec: nobody notices.
    processes.kill(node.part("elastic.agent.starters.spawner"))
    job.wait_for_more_steps(number, 2)

    # The store, and the spare one, in their turn: one is the round's, the other nobody's.
    stores = [p.pid for p in processes.children(agent) if "elastic-store" in p.command]
    assert len(stores) == 2, job.dump()
    processes.kill(*stores)
    number = job.wait_for_steps(2, after=number, count=3)
    assert any("the store on node0 died" in event for event in job.events()), job.dump()

    # The master: no rank notices.
    processes.kill(master)
    job.wait_for("a new master", lambda: node.master() != master or None)
    job.wait_for_event("master is back in epoch 2")
    job.wait_for_more_steps(number, 2)
    assert job.round() == number, job.dump()

    # The agent, with all that hangs on it.
    processes.kill(agent)
    number = job.wait_for_steps(2, after=number, count=3)
    assert node.agent() != agent

    # A rank and the standby, once there is one again.
    job.wait_for("the standby", lambda: node.said().count("the standby is ready") == 3 or None)
    processes.kill(job.rank(number, 0), node.part("elastic-standby"))
    number = job.wait_for_steps(2, after=number, count=3)

    job.finish()
    job.ends(0)
    steps = [line.fields["step"] for line in job.told("step", rank=0)]
    assert sorted(set(steps)) == list(range(1, max(steps) + 1)), "a step is missing"


@pytest.mark.parametrize(
    "parts",
    ["agent rank0 rank1", "agent master", "master rank0", "agent master rank0 rank1 store"],
)
def test_several_parts_in_one_instant(job: Job, parts: str) -> None:
    node = job.start(script=("--child", "--store"))
    number = job.wait_for_steps(2)
    found: dict[str, Callable[[], int]] = {
        "agent": node.agent,
        "master": node.master,
        "store": lambda: node.part("agent.store"),
        "rank0": lambda: job.rank(number, 0),
        "rank1": lambda: job.rank(number, 1),
    }
    processes.kill(*[found[part]() for part in parts.split()])
    job.wait_for_steps(2, after=number)
    job.finish()
    job.ends(0)


def test_who_never_imports_torch_has_no_store(job: Job) -> None:
    node = job.start()
    job.wait_for_steps(2, count=3)
    assert _stores(node) == [], job.dump()
    job.finish()
    job.ends(0)


def test_who_imports_torch_has_a_store_before_it_asks(job: Job) -> None:
    node = job.start(script=("--shared",))
    job.wait_for_steps(2, count=3)
    job.wait_for("a store", lambda: _stores(node) or None)
    job.finish()
    job.ends(0)


def _stores(node: Node) -> list[int]:
    below = processes.descendants(node.guardian)
    return [p.pid for p in below if "agent.store" in p.command or "elastic-store" in p.command]


def test_shared_memory_goes_with_the_ranks_that_held_it(job: Job) -> None:
    """Whoever ends them: the agent as others of their round, the guardian after the agent, the job."""
    node = job.start(script=("--torch", "--shared"))
    number = job.wait_for_steps(2)
    held = len(job.shared())
    assert held >= 4, job.dump()
    for part in ("rank", "agent"):
        processes.kill(job.rank(number, 0) if part == "rank" else node.agent())
        number = job.wait_for_steps(2, after=number)
        job.wait_for(f"{held} pieces of shared memory", lambda: len(job.shared()) <= held or None)
    job.finish()
    job.ends(0)


@pytest.mark.parametrize("on_term", ["die", "work"])
def test_without_its_guardian_everything_ends(job: Job, on_term: str) -> None:
    node = job.start("--shutdown-timeout", "20", script=("--child", "--on-term", on_term))
    job.wait_for_steps(2)
    node.signal(signal.SIGKILL)
    assert node.exit_code() == -signal.SIGKILL
    _nothing_is_left_soon(job)
    if on_term == "work":
        assert {line.rank for line in job.told("saved")} == {0, 1}, job.dump()


def test_without_its_guardian_nobody_waits_for_a_storage_that_takes_nothing(job: Job) -> None:
    blocked = ("--persist-every", "1", "--block", "1")
    saves = (str(SCRIPT.parent / "saves.py"), str(job.folder), *blocked)
    node = job.start(FORK, "--shutdown-timeout", "600", entry=saves)
    job.wait_for("a word about it", lambda: "is not on storage yet" in node.said() or None)
    node.signal(signal.SIGKILL)
    assert node.exit_code() == -signal.SIGKILL
    _nothing_is_left_soon(job)


def test_without_guardian_and_master_everything_ends(job: Job) -> None:
    node = job.start(script=("--child",))
    job.wait_for_steps(2)
    processes.kill(node.guardian, node.master())
    node.exit_code()
    _nothing_is_left_soon(job)


def test_ranks_of_a_dead_launcher_keep_their_grace_when_another_job_starts(job: Job) -> None:
    """Every launcher ends what dead ones left; but here an agent still looks after it."""
    node = job.start("--shutdown-timeout", "50", script=("--on-term", "hold"))
    job.wait_for_steps(2)
    node.signal(signal.SIGKILL)
    assert node.exit_code() == -signal.SIGKILL
    job.nodes.clear()
    job.wait_for("both to have SIGTERM", lambda: len(job.told("term")) == 2)
    assert another_job(job).exit_code() == 0, job.dump()
    job.finish()
    _nothing_is_left_soon(job)
    assert {line.rank for line in job.told("saved")} == {0, 1}, job.dump()


def test_what_outlives_launcher_and_agent_is_ended_by_the_next_launcher(job: Job) -> None:
    if (group := cgroup.create()) is None:
        pytest.skip("no cgroup (version 2) that we may use")
    # A cgroup of this test's own: any launcher beside it would end what is left, too.
    inside = ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    node = job.start(script=("--child",), prefix=inside)
    number = job.wait_for_steps(2)
    children = [line.fields["child"] for line in job.told("child", round=number)]
    agent = node.agent()
    processes.kill(node.guardian, agent, number=signal.SIGSTOP)
    processes.kill(agent, node.guardian)  # in this order: a dead guardian's agent gets a SIGCONT
    assert node.exit_code() == -signal.SIGKILL
    assert all(map(processes.alive, children)), "nothing was left to end"
    assert another_job(job, inside).exit_code() == 0, job.dump()
    _nothing_is_left_soon(job)
    every = [*group.glob("elastic-*"), group]
    job.wait_for("the end of its cgroups", lambda: all(cgroup.end(each) for each in every))


def another_job(job: Job, prefix: Sequence[str] = ()) -> Node:
    command = (sys.executable, "-m", "elastic.run", "--standalone", "--no-python", "true")
    return job.launch("another", command, {}, prefix)


def _nothing_is_left_soon(job: Job) -> None:
    job.nodes.clear()  # its launcher is gone, and nobody can say how the job ended
    job.assert_nothing_left(soon=True)


# --- a process that SIGKILL does not end ---


def test_a_rank_that_no_signal_ends_fails_its_node(job: Job, stuck_folder: StuckFolder) -> None:
    """Its node leaves with the reason; nothing but that process is left."""
    node = job.start(script=("--child", "--fault", "step:stuck:0:1"))
    stuck = stuck_folder.victim(DEADLINE)
    processes.kill(job.rank(1, 1))
    assert node.exit_code() == 1, job.dump()
    assert f"process {stuck} of rank 0 does not end on SIGKILL" in node.said(), job.dump()
    left = [process.pid for process in job.left()]
    assert left == [stuck], job.dump()


@pytest.mark.soak
def test_an_agent_dies_with_a_rank_that_no_signal_ends(job: Job, stuck_folder: StuckFolder) -> None:
    """The guardian waits for it for 10 s, without a look more than there is to see."""
    node = job.start(script=("--fault", "step:stuck:0:1"))
    stuck = stuck_folder.victim(DEADLINE)
    before = processes.cpu_seconds(node.guardian)
    processes.kill(node.agent())
    job.wait_for_steps(2, after=1)
    assert processes.cpu_seconds(node.guardian) - before < 2, job.dump()
    job.finish()
    assert node.exit_code() == 0, job.dump()
    assert [process.pid for process in job.left()] == [stuck], job.dump()


def test_parts_that_no_signal_ends_do_not_hold_up_the_end(job: Job, freezer: Freezer) -> None:
    node = job.start(script=("--store",))
    job.wait_for_steps(2)
    stuck = {node.part("elastic.agent.starters.spawner"), node.part("elastic-store")}
    freezer.freeze(*stuck)
    job.finish()
    assert node.exit_code() == 0, job.dump()
    for pid in stuck:
        assert node.said().count(f"process {pid} ") == 1, job.dump()
    assert {process.pid for process in job.left()} == stuck, job.dump()


@pytest.mark.soak
def test_a_store_that_no_signal_ends_is_waited_for_once(job: Job, freezer: Freezer) -> None:
    """Its round is over; sweeps, which end all that no round needs, do not mind it again."""
    node = job.start(script=("--store",))
    number = job.wait_for_steps(2)
    stuck = node.part("elastic-store")
    freezer.freeze(stuck)
    for _ in range(3):
        processes.kill(job.rank(number, 0))
        number = job.wait_for_steps(2, after=number)
    assert node.said().count(f"process {stuck} ") == 1, job.dump()
    job.finish()
    assert node.exit_code() == 0, job.dump()
    assert node.said().count(f"process {stuck} ") == 1, job.dump()
    assert [process.pid for process in job.left()] == [stuck], job.dump()

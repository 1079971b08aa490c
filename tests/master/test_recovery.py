"""Whose fault a failure is, and what it costs."""

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.master import recovery as medic
from elastic.master.events import Failed, NodeId, RankFailure
from elastic.master.policy import Policy
from elastic.master.recovery import (
    COUNTED,
    Cause,
    Fail,
    Hold,
    Observed,
    Recovery,
    Restart,
    charge,
    classify,
    describe,
    fingerprint,
    judge,
)
from tests.master.builders import BUG, CLOSED, KILLED, failure

FALLEN = ("NVRM: Xid (PCI:0000:03:00): 79, pid=0, GPU has fallen off the bus.",)
INITIALISATION = "NVRM: Xid (PCI:0000:03:00): 143, pid=0, GPU Initialization Failed"
KERNEL_KILLS = ("Out of memory: Killed process 7899 (python) total-vm:26184840kB",)
OOM = "Memory cgroup out of memory: Killed process 7899 (pt_data_worker) total-vm:26184840kB"
LOST_WORKER = "DataLoader worker (pid 7899) is killed by signal: Killed. "
WATCHDOG = "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"

CASES = [
    (failure(exit_code=-9), Cause.KILLED),
    (failure(exit_code=-15), Cause.KILLED),
    (failure(exit_code=-1), Cause.KILLED),
    (failure(exit_code=137), Cause.KILLED),
    (failure(exit_code=143), Cause.KILLED),
    (failure(exit_code=130), Cause.ERROR),
    (failure(exit_code=150), Cause.ERROR),
    (failure(exit_code=137, error_type="SystemError"), Cause.ERROR),
    (failure(exit_code=-9, oom_killed=True), Cause.KERNEL_OOM),
    (failure(exit_code=137, oom_killed=True), Cause.KERNEL_OOM),
    (failure(exit_code=-9, kernel_log=KERNEL_KILLS), Cause.KERNEL_OOM),
    (failure(exit_code=1, kernel_log=KERNEL_KILLS), Cause.ERROR),
    (failure(error_type="AcceleratorError", kernel_log=FALLEN), Cause.HARDWARE),
    (failure(exit_code=-6, kernel_log=FALLEN), Cause.HARDWARE),
    (
        failure(exit_code=-7, kernel_log=("Memory failure: 0x1f3a: recovery action",)),
        Cause.HARDWARE,
    ),
    (
        failure(exit_code=-7, kernel_log=("mce: [Hardware Error]: Machine check: corrected",)),
        Cause.CRASH,
    ),
    (failure(error_type="AcceleratorError", kernel_log=(INITIALISATION,)), Cause.HARDWARE),
    (failure(exit_code=-9, what=Failed.TIMER), Cause.ERROR),
    (failure(exit_code=-11), Cause.CRASH),
    (failure(exit_code=-6), Cause.CRASH),
    (failure(exit_code=-8), Cause.CRASH),
    (failure(exit_code=-4), Cause.CRASH),
    (failure(exit_code=-7), Cause.CRASH),
    (failure(exit_code=-5), Cause.CRASH),
    (failure(exit_code=-6, log_tail=WATCHDOG), Cause.NETWORK),
    (failure(exit_code=-11, log_tail=WATCHDOG), Cause.CRASH),
    (failure(exit_code=3), Cause.ERROR),
    (failure(exit_code=0), Cause.ERROR),
    (failure(exit_code=-(10**30)), Cause.KILLED),
    (failure(error_type="ValueError", message="Connection closed by peer"), Cause.ERROR),
    (failure(error_type="RuntimeError", message="shape mismatch"), Cause.ERROR),
    (failure(error_type="RuntimeError", message=LOST_WORKER), Cause.ERROR),
    (failure(error_type="RuntimeError", message=LOST_WORKER, kernel_log=(OOM,)), Cause.KERNEL_OOM),
    (failure(error_type="RuntimeError", message="shape mismatch", kernel_log=(OOM,)), Cause.ERROR),
    (failure(error_type="KeyboardInterrupt", exit_code=-2), Cause.ERROR),
    (failure(exit_code=-signal.SIGINT), Cause.KILLED),
    (failure(exit_code=-signal.SIGALRM), Cause.CRASH),
    (failure(exit_code=-signal.SIGXCPU), Cause.CRASH),
    (failure(error_type="torch.OutOfMemoryError", message="CUDA out of memory."), Cause.DEVICE_OOM),
    (failure(error_type="OutOfMemoryError"), Cause.DEVICE_OOM),
    (failure(error_type="RuntimeError", message="HIP out of memory. Tried"), Cause.DEVICE_OOM),
    (failure(error_type="MemoryError"), Cause.ERROR),
    (failure(error_type="DistNetworkError", message="failed to recv, got 0 bytes"), Cause.NETWORK),
    (failure(error_type="torch.distributed.DistNetworkError"), Cause.NETWORK),
    (failure(error_type="DistStoreError", message="wait timeout after 10ms"), Cause.NETWORK),
    (failure(error_type="DistBackendError", message="NCCL error in: ..."), Cause.NETWORK),
    (CLOSED, Cause.NETWORK),
    (
        failure(
            error_type="RuntimeError",
            message="[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
            "Timed out waiting 1800000ms for recv operation to complete",
        ),
        Cause.NETWORK,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="[gloo/transport/tcp/pair.cc:446] writev [10.0.0.1]:7010: Broken pipe",
        ),
        Cause.NETWORK,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="[gloo/transport/tcp/pair.cc:534] Connection reset by peer [10.0.0.1]:7010",
        ),
        Cause.NETWORK,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="NCCL communicator was aborted on rank 1.",
        ),
        Cause.NETWORK,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="Distributed package doesn't have NCCL built in",
        ),
        Cause.ERROR,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        ),
        Cause.ERROR,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="[enforce fail at gloo/transport/tcp/pair.cc:454] op.preamble.length <= "
            "op.nbytes. 8 vs 4",
        ),
        Cause.ERROR,
    ),
    (
        failure(
            error_type="torch.AcceleratorError",
            message="CUDA error: uncorrectable ECC error encountered",
        ),
        Cause.HARDWARE,
    ),
    (
        failure(
            error_type="RuntimeError",
            message="[Rank 0]: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        ),
        Cause.NETWORK,
    ),
    (failure(what=Failed.STORE), Cause.STORE_LOST),
    (failure(what=Failed.STORE, oom_killed=True), Cause.KERNEL_OOM),
    (failure(what=Failed.START), Cause.NO_START),
]


@pytest.mark.parametrize(("seen", "cause"), CASES)
def test_classification(seen: RankFailure, cause: Cause) -> None:
    assert classify(seen) is cause


def observed(*failures: RankFailure, at: float = 100.0, apart: float = 0.1) -> tuple[Observed, ...]:
    return tuple(
        Observed(node_id=NodeId(f"n{i}"), failure=replace(f, rank=i), at=at + i * apart)
        for i, f in enumerate(failures)
    )


TRAIL = failure(error_type="TrainingError", log_tail="DistNetworkError: failed to recv, got 0")


@pytest.mark.parametrize(
    ("failures", "root"),
    [
        ((CLOSED, CLOSED, KILLED, CLOSED), 2),
        ((KILLED, BUG), 0),
        ((BUG, KILLED), 0),
        ((TRAIL, KILLED), 1),
        ((CLOSED, failure(exit_code=-6, log_tail=WATCHDOG), failure(exit_code=-11)), 2),
        ((CLOSED, TRAIL), 0),
        ((TRAIL, CLOSED), 0),
    ],
)
def test_the_root_cause_among_followers(failures: tuple[RankFailure, ...], root: int) -> None:
    seen = observed(*failures)
    _, verdict = judge(Recovery(), seen, 0.0, 200.0, Policy(max_restarts=9))
    assert isinstance(verdict, Restart)
    assert verdict.root is seen[root]
    assert verdict.cause is classify(failures[root])


@pytest.mark.parametrize(
    ("failures", "doubt", "until"),
    [
        ((CLOSED,), 0.0, 101.0),
        ((CLOSED,), 105.0, 101.0),
        ((TRAIL,), 0.0, 101.0),
        ((TRAIL,), 105.0, 105.0),
        ((BUG,), 0.0, None),
        ((BUG,), 105.0, 105.0),
        ((KILLED,), 105.0, None),
        ((CLOSED, KILLED), 105.0, None),
        ((failure(exit_code=-11),), 104.0, 104.0),
        ((failure(exit_code=-9, oom_killed=True),), 104.0, None),
    ],
)
def test_how_long_a_verdict_waits(
    failures: tuple[RankFailure, ...], doubt: float, until: float | None
) -> None:
    seen = observed(*failures)
    state, verdict = judge(Recovery(), seen, doubt, 100.2, Policy(max_restarts=9))
    if until is None:
        assert not isinstance(verdict, Hold)
        return
    assert isinstance(verdict, Hold)
    assert verdict.until == until
    assert state == Recovery(), "holding costs nothing"
    _, verdict = judge(Recovery(), seen, doubt, until, Policy(max_restarts=9))
    assert not isinstance(verdict, Hold)


def pay(state: Recovery, cause: Cause, root: Observed | None, policy: Policy) -> Recovery:
    state, verdict = charge(state, cause, "it", root, policy)
    assert isinstance(verdict, Restart), verdict
    return state


def test_the_scripts_own_errors_count() -> None:
    (root,) = observed(BUG)
    _, verdict = charge(Recovery(), Cause.ERROR, "it", root, Policy())
    assert verdict == Fail(Cause.ERROR, "it", root)
    policy = Policy(max_restarts=2)
    state = pay(pay(Recovery(), Cause.ERROR, root, policy), Cause.CRASH, None, policy)
    assert (state.restarts, state.faults) == (2, 0)
    _, verdict = charge(state, Cause.DEVICE_OOM, "it", None, policy)
    assert isinstance(verdict, Fail)
    assert verdict.reason == "it after 2 restarts"


@pytest.mark.parametrize("cause", sorted(set(Cause) - COUNTED - medic.FREE))
def test_what_was_done_to_it_costs_the_budget(cause: Cause) -> None:
    policy = Policy(max_restarts=0, fault_budget=1)
    state = pay(Recovery(), cause, None, policy)
    assert (state.restarts, state.faults) == (0, 1)
    _, verdict = charge(state, cause, "it", None, policy)
    assert isinstance(verdict, Fail)


@pytest.mark.parametrize("cause", [Cause.GROWTH, Cause.REQUEST])
def test_what_is_nobodys_fault_is_free(cause: Cause) -> None:
    policy = Policy(fault_budget=0)
    state = Recovery()
    for _ in range(50):
        state = pay(state, cause, None, policy)
    assert state == Recovery()


def test_the_budget_grows_back_with_progress() -> None:
    policy = Policy(fault_budget=3)
    state = Recovery()
    for _ in range(3):
        state = pay(state, Cause.KILLED, None, policy)
    for _ in range(20):
        state = pay(medic.progressed(state, told=True), Cause.NODE_LOST, None, policy)
    assert medic.progressed(Recovery(), told=True) == Recovery()


def last(failed: RankFailure, *steps: int, supplied: bool = True) -> type:
    """What the last verdict is where a rank ends so at each of these steps."""
    state, verdict = Recovery(), None
    for step in steps:
        seen = (Observed(node_id=NodeId("a"), failure=failed, at=0.0),)
        policy = Policy(max_restarts=9, supplied=supplied)
        state, verdict = judge(medic.progressed(state, told=True), seen, 0.0, 9.0, policy, step)
    return type(verdict)


def test_a_pods_memory_is_used_up_twice_at_a_similar_step() -> None:
    oom = failure(exit_code=-9, oom_killed=True)
    assert last(oom, 100, 105) is Fail
    assert last(oom, 100, 300) is Restart
    assert last(failure(what=Failed.STORE, oom_killed=True), 100, 105) is Fail
    assert last(oom, 0, 0) is Fail
    assert last(oom, 100, 105, supplied=False) is Restart
    by_others = failure(exit_code=-9, kernel_log=KERNEL_KILLS)
    assert last(by_others, 100, 105) is Restart


def test_a_pods_image_lacks_what_is_imported() -> None:
    lacks = failure(error_type="ModuleNotFoundError", message="No module named 'x'")
    seen = (Observed(node_id=NodeId("a"), failure=lacks, at=0.0),)
    for supplied, kind in ((True, Fail), (False, Restart)):
        policy = Policy(max_restarts=9, supplied=supplied)
        assert type(judge(Recovery(), seen, 0.0, 9.0, policy)[1]) is kind
    assert last(lacks, 5) is Restart, "it was there once"


def test_the_budget_grows_back_with_time() -> None:
    state = replace(Recovery(), faults=3, restarts=1, seen={"a": 2})
    assert medic.rested(state, medic.REGROW - 1) is state
    rested = medic.rested(state, 2 * medic.REGROW)
    assert rested == replace(state, faults=1), "and it forgives nothing else"
    assert medic.rested(state, 99 * medic.REGROW).faults == 0


def test_the_same_failure_three_times_is_deterministic() -> None:
    policy = Policy(max_restarts=100)
    state = Recovery()
    for attempt in (1, 2):
        (root,) = observed(replace(BUG, message=f"bad value {attempt} at 0x7fAb{attempt}"))
        state = pay(state, Cause.ERROR, root, policy)
    _, verdict = charge(state, Cause.ERROR, "it", root, policy)
    assert isinstance(verdict, Fail)
    assert verdict.reason == "it: the same failure 3 times with no new step finished in between"
    pay(medic.progressed(state, told=True), Cause.ERROR, root, policy)


def test_ranks_that_end_early_three_times_end_the_job_however_many_steps_they_had() -> None:
    """The others fail for want of them, which is no fault of the network's."""
    state, seen = Recovery(), observed(CLOSED)
    for _ in range(2):
        _, held = judge(state, seen, 0.0, 100.2, Policy(), 40, [1])
        assert isinstance(held, Hold)
        state, verdict = judge(state, seen, 0.0, held.until, Policy(), 40, [1])
        assert isinstance(verdict, Restart)
        assert verdict.cause is Cause.UNEVEN
        assert verdict.reason.startswith("rank 1 had ended, with 0, while others went on; ")
        state = medic.progressed(state, told=True)
    _, verdict = judge(state, seen, 0.0, 200.0, Policy(), 40, [1])
    assert isinstance(verdict, Fail)
    assert verdict.reason.endswith(": the same failure 3 times")
    _, verdict = judge(state, observed(KILLED), 0.0, 200.0, Policy(), 40, [1])
    assert isinstance(verdict, Restart), "it was killed, whoever had ended"
    state = medic.rested(state, medic.REGROW)
    _, verdict = judge(state, seen, 0.0, 200.0, Policy(), 40, [1])
    assert isinstance(verdict, Restart), "it went well for long"


def test_different_failures_are_not_deterministic() -> None:
    policy = Policy(max_restarts=100)
    state = Recovery()
    for name in ("one", "two", "three", "four"):
        (root,) = observed(replace(BUG, message=name))
        state = pay(state, Cause.ERROR, root, policy)


@pytest.mark.parametrize("cause", [Cause.KILLED, Cause.NODE_LOST, Cause.AGENT_LOST])
def test_what_strikes_from_outside_is_never_deterministic(cause: Cause) -> None:
    (root,) = observed(KILLED)
    state = Recovery()
    for _ in range(10):
        state = pay(state, cause, root, Policy())


def test_a_kernel_oom_is_deterministic_though_it_is_not_counted() -> None:
    (root,) = observed(failure(exit_code=-9, oom_killed=True))
    state = Recovery()
    for _ in range(2):
        state = pay(state, Cause.KERNEL_OOM, root, Policy())
    _, verdict = charge(state, Cause.KERNEL_OOM, "it", root, Policy())
    assert isinstance(verdict, Fail)


@given(st.integers(0), st.integers(0))
def test_numbers_do_not_make_failures_different(one: int, other: int) -> None:
    first, second = (
        observed(replace(BUG, message=f"tensor 0x{n:X} of step {n} on rank {n}"))[0]
        for n in (one, other)
    )
    assert fingerprint(Cause.ERROR, first) == fingerprint(Cause.ERROR, second)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (BUG, "rank 0 on n0 raised ValueError: bad value 17"),
        (failure(error_type="KeyError"), "rank 0 on n0 raised KeyError"),
        (failure(error_type="E", message="\n  one\ntwo"), "rank 0 on n0 raised E: one"),
        (failure(exit_code=3), "rank 0 on n0 exited with 3"),
        (
            failure(exit_code=1, message="cannot start: no such file"),
            "rank 0 on n0 exited with 1: cannot start: no such file",
        ),
        (KILLED, "rank 0 on n0 was ended by SIGKILL"),
        (failure(exit_code=-99), "rank 0 on n0 was ended by signal 99"),
        (
            failure(exit_code=-9, oom_killed=True),
            "rank 0 on n0 was killed by the kernel, out of memory",
        ),
        (failure(what=Failed.STORE), "the store on n0 died"),
        (
            failure(what=Failed.STORE, oom_killed=True),
            "the store on n0 was killed by the kernel, out of memory",
        ),
    ],
)
def test_a_failure_in_one_line(seen: RankFailure, text: str) -> None:
    assert describe(observed(seen)[0]) == text


@given(
    st.builds(
        RankFailure,
        rank=st.integers(),
        local_rank=st.integers(),
        exit_code=st.integers(),
        error_type=st.text(max_size=8) | st.sampled_from(["RuntimeError", "DistStoreError"]),
        message=st.text(max_size=40),
        log_tail=st.text(max_size=40),
        oom_killed=st.booleans(),
        kernel_log=st.sampled_from([(), FALLEN, KERNEL_KILLS, ("nonsense",)]),
    )
)
def test_any_failure_can_be_judged(seen: RankFailure) -> None:
    places = (Observed(node_id=NodeId("n"), failure=seen, at=0.0),)
    _, verdict = judge(Recovery(), places, 0.0, 5.0, Policy(max_restarts=1))
    assert isinstance(verdict, Restart)
    assert verdict.reason
    assert len(verdict.reason.splitlines()) == 1

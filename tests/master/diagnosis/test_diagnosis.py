"""The verdicts on the corpus, on texts nobody has seen, and on a few telling failures."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.master.diagnosis import Diagnosis, Host, diagnose
from elastic.master.events import Failed, NodeId, RankFailure
from elastic.master.reading import Observed, Weight, ends, read
from elastic.master.symptoms import ACTIONS
from tests.master.diagnosis.corpus import LATER, Case, load

A, B = NodeId("node-0"), NodeId("node-1")
CLOSED = "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:25513."
LATE = "[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"


def wrong(cases: Sequence[Case]) -> tuple[list[str], list[str]]:
    """What was named wrongly, and what was placed wrongly."""
    named, placed = [], []
    for case in cases:
        told = diagnose(case.failures, case.hosts)
        culprit = (case.culprit.node_id, case.culprit.rank) if case.culprit else (None, None)
        if told.label != case.label:
            named.append(f"{case.id}: {told.label}, since {told.evidence[0]}")
        if (told.node_id, told.rank) != culprit:
            placed.append(f"{case.id}: {told.node_id} {told.rank}, not {culprit}")
    return named, placed


def as_told(case: Case) -> Case:
    """As agents tell it: each rank that fails tells what its node's kernel has logged."""
    failures = tuple(
        replace(o, failure=replace(o.failure, kernel_log=case.hosts[o.node_id].kernel_log))
        for o in case.failures
    )
    heard = {o.node_id for o in failures}
    hosts = {n: h if n in heard else replace(h, kernel_log=()) for n, h in case.hosts.items()}
    return replace(case, failures=failures, hosts=hosts)


def test_all_known_cases_are_right() -> None:
    """95 of 100 would do; but a rule that is lost is to be seen."""
    cases = load("known")
    assert wrong(cases) == ([], [])
    named, placed = wrong([as_told(case) for case in cases if case.failures])
    assert named == []
    assert len(placed) <= 1, "\n".join(placed)


def test_of_the_cases_held_out_90_of_100_are_right() -> None:
    """Counts alone are told: whoever tunes the rules is not to see these."""
    cases = load("held_out")
    named, placed = wrong(cases)
    either = {line.partition(": ")[0] for line in (*named, *placed)}
    assert len(either) <= 0.1 * len(cases), f"{len(either)} of {len(cases)} are not right"
    counts = len(named), len(placed), len(either)
    assert all(map(int.__le__, counts, (11, 6, 14))), f"{counts}: a rule that was there is lost"


def test_what_was_recorded_since_is_right() -> None:
    """But for a lost node, which over NCCL looks like a rank that hangs: heartbeats tell of it."""
    cases = load(LATER)
    lost = [case for case in cases if case.label == "node_lost"]
    others = [case for case in cases if case.label != "node_lost"]
    assert len(others) >= 14
    assert wrong(others) == ([], [])
    assert wrong([as_told(case) for case in others]) == ([], [])
    for case in lost:
        told = diagnose(case.failures, case.hosts)
        assert case.culprit
        assert (told.label, told.node_id) == ("peer_hung", case.culprit.node_id)


def test_every_verdict_has_evidence() -> None:
    for case in load("known"):
        told = diagnose(case.failures, case.hosts)
        assert told.label in ACTIONS
        assert 1 <= len(told.evidence) <= 3, case.id
        assert all(line and "\n" not in line for line in told.evidence), case.id


def test_what_an_end_says_does_not_rest_on_addresses_and_ranks() -> None:
    for case in load("known"):
        for told in case.failures:
            assert ends(told.failure) == (read(told).label, read(told).weight), case.id


@given(st.data())
def test_neither_the_order_of_reports_nor_that_of_followers_moves_the_culprit(
    data: st.DataObject,
) -> None:
    case = data.draw(st.sampled_from(load("known")))
    want = where(diagnose(case.failures, case.hosts))
    follow = [o for o in case.failures if read(o).weight <= Weight.TIMED_OUT]
    moved = dict(zip(follow, data.draw(st.permutations([o.at for o in follow])), strict=True))
    mixed = data.draw(st.permutations(case.failures))
    later = [replace(o, at=moved.get(o, o.at)) for o in mixed]
    assert where(diagnose(later, case.hosts)) == want, case.id


TEXT = st.text(max_size=300) | st.sampled_from(
    [CLOSED, LATE, "CUDA error: ", "Ranks 99999999999999999999 failed to pass monitoredBarrier",
     "OpType=X, NumelIn=1, NumelOut=2 SeqNum=" + "9" * 400, "NVRM: Xid (PCI:0:0): 99999999"]
)  # fmt: skip
FAILURES = st.builds(
    Observed,
    node_id=st.sampled_from([A, B, NodeId("")]),
    at=st.floats(0, 1e9),
    failure=st.builds(
        RankFailure,
        rank=st.integers(0, 40) | st.integers(-(1 << 40), 1 << 40),
        local_rank=st.integers(0, 8),
        exit_code=st.integers(-70, 256),
        error_type=TEXT,
        message=TEXT,
        frame=TEXT,
        log_tail=TEXT,
        oom_killed=st.booleans(),
        what=st.sampled_from(Failed),
    ),
)
HOSTS = st.dictionaries(
    st.sampled_from([A, B]),
    st.builds(
        Host,
        kernel_log=st.lists(TEXT, max_size=3).map(tuple),
        container_exit=st.none() | st.integers(-1, 255),
    ),
)


@given(st.lists(FAILURES, min_size=1, max_size=6), HOSTS)
def test_any_text_has_a_verdict(failures: list[Observed], hosts: dict[NodeId, Host]) -> None:
    told = diagnose(failures, hosts)
    assert told.label in ACTIONS
    assert 1 <= len(told.evidence) <= 3
    assert told.node_id is not None or told.rank is None


def where(told: Diagnosis) -> tuple[str, NodeId | None, int | None]:
    return told.label, told.node_id, told.rank


def end(
    rank: int, message: str = "", kind: str = "", *, node: NodeId = A, at: float = 1.0,
    exit_code: int = 1, tail: str = "", frame: str = "train.py:9 in main",
) -> Observed:  # fmt: skip
    failure = RankFailure(
        rank=rank, local_rank=rank % 2, exit_code=exit_code, error_type=kind, message=message,
        frame=frame, log_tail=tail,
    )  # fmt: skip
    return Observed(node_id=node, failure=failure, at=at)


def peers(*numbers: int, said: str = CLOSED) -> list[Observed]:
    return [end(n, said, "RuntimeError", node=A if n < 2 else B, at=0.1 * (n + 1)) for n in numbers]


TWO = {A: Host(), B: Host()}


def test_an_exception_that_is_told_last_outranks_what_peers_say_of_its_rank() -> None:
    told = diagnose([*peers(0, 1, 2), end(3, "7", "KeyError", node=B, at=9.0)], TWO)
    assert where(told) == ("script_error", B, 3)


def test_a_rank_that_gave_up_waiting_is_no_culprit() -> None:
    told = diagnose(peers(0, 1, 3, said=LATE), TWO)
    assert where(told) == ("peer_hung", B, 2), told.evidence


def test_a_signal_after_an_exception_is_ours_or_an_operators() -> None:
    killed = end(0, exit_code=-9, at=0.5)
    told = diagnose([killed, end(1, "bad", "ValueError", at=0.4)], TWO)
    assert where(told) == ("script_error", A, 1)
    assert where(diagnose([killed, *peers(1, 2, 3)], TWO)) == ("killed", A, 0)


def test_the_kernel_outranks_what_processes_say() -> None:
    log = ("NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus.",)
    told = diagnose(
        [end(0, "unknown error", "RuntimeError"), *peers(2, 3)],
        {A: Host(kernel_log=log), B: Host()},
    )
    assert where(told) == ("gpu_lost", A, 0)
    assert "Xid" in told.evidence[0]


def test_an_instance_of_a_gpu_is_a_gpu() -> None:
    log = ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9)",)
    told = diagnose([end(0, "unknown error", "RuntimeError")], {A: Host(kernel_log=log)})
    assert where(told) == ("ecc_error", A, 0)


CAUGHT = """Traceback (most recent call last):
  File "train.py", line 9, in log_metrics
requests.exceptions.ConnectionError: HTTPSConnectionPool(host='mlflow', port=443): Max retries exceeded with url: /api
{between}
Traceback (most recent call last):
  File "train.py", line 30, in main
RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x512 and 1024x10)
"""
SHAPES = "mat1 and mat2 shapes cannot be multiplied (8x512 and 1024x10)"


def test_what_was_caught_before_is_not_blamed() -> None:
    tail = CAUGHT.format(between="step 120 loss 2.31")
    told = diagnose([end(0, SHAPES, "RuntimeError", tail=tail)], {A: Host()})
    assert where(told) == ("script_error", A, 0)
    chained = "During handling of the above exception, another exception occurred:\n"
    told = diagnose(
        [end(0, SHAPES, "RuntimeError", tail=CAUGHT.format(between=chained))], {A: Host()}
    )
    assert told.label == "network"


@pytest.mark.parametrize(
    "line",
    [
        "gpu0: ECC errors: 0, NVLink errors: 0",
        "config: cudnn_benchmark: True, CUBLAS_WORKSPACE_CONFIG=:4096:8",
        "UserWarning: torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling.",
    ],
)
def test_words_about_devices_that_are_well_blame_none(line: str) -> None:
    told = diagnose([end(0, "odd", "RuntimeError", tail=f"{line}\nRuntimeError: odd")], {A: Host()})
    assert where(told) == ("script_error", A, 0)


def test_a_corrected_memory_error_is_not_blamed_for_an_exception() -> None:
    hosts = {A: Host(kernel_log=("mce: [Hardware Error]: Machine check events logged",))}
    assert where(diagnose([end(0, "3", "KeyError")], hosts)) == ("script_error", A, 0)
    assert where(diagnose([end(0, exit_code=-11)], hosts)) == ("host_hardware", A, 0)


@pytest.mark.parametrize(("code", "label"), [(128, "no_device"), (137, "killed")])
def test_a_container_tells_by_its_exit_code(code: int, label: str) -> None:
    told = diagnose(peers(0, 1), {A: Host(), B: Host(container_exit=code)})
    assert where(told) == (label, B, None)


def test_137_with_a_record_of_the_kernels_is_out_of_memory() -> None:
    log = ("Memory cgroup out of memory: Killed process 7 (python)",)
    told = diagnose(peers(0, 1), {A: Host(), B: Host(container_exit=137, kernel_log=log)})
    assert where(told) == ("cgroup_oom", B, None)


def test_nothing_heard_from_a_node_whose_peers_lost_it() -> None:
    assert where(diagnose(peers(0, 1), TWO)) == ("node_lost", B, None)


def test_no_failure_is_no_question() -> None:
    with pytest.raises(ValueError, match="no failure"):
        diagnose([], TWO)

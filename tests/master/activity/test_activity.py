"""What ranks do, by stacks recorded from real processes (`record.py`), and by some that live."""

import asyncio
import json
from pathlib import Path
from types import CodeType

import pytest

from elastic.agent import waits
from elastic.agent.evidence.look import Looker
from elastic.master import activity, tree
from elastic.master.activity import Activity, Doing
from elastic.proto import codec, looks
from elastic.proto.looks import Look
from tests.master.activity import record
from tests.master.activity.programs import PROGRAMS

HERE = Path(__file__).parent

EXPECTED = {
    "all_reduce": (Activity.COLLECTIVE, "all_reduce"),
    "broadcast": (Activity.COLLECTIVE, "broadcast"),
    "barrier": (Activity.COLLECTIVE, "barrier"),
    "monitored_barrier": (Activity.COLLECTIVE, "monitored_barrier"),
    "all_gather_into_tensor": (Activity.COLLECTIVE, "all_gather_into_tensor"),
    "reduce_scatter_tensor": (Activity.COLLECTIVE, "reduce_scatter_tensor"),
    "all_to_all_single": (Activity.COLLECTIVE, "all_to_all_single"),
    "all_gather_object": (Activity.COLLECTIVE, "all_gather_object"),
    "new_group": (Activity.COLLECTIVE, "new_group"),
    "init_process_group": (Activity.COLLECTIVE, "init_process_group"),
    "functional_all_reduce": (Activity.COLLECTIVE, "wait_tensor"),
    "functional_wait": (Activity.COLLECTIVE, "wait_tensor"),
    "fsdp_forward": (Activity.COLLECTIVE, "all_gather_single"),
    "fsdp_backward": (Activity.COLLECTIVE, "reduce_scatter_single"),
    "ddp_made": (Activity.COLLECTIVE, "_verify_param_shape_across_processes"),
    "send": (Activity.P2P, "send"),
    "recv": (Activity.P2P, "recv"),
    # A wait of which Python shows only the script's own line: for a rank or for a thread.
    "all_reduce_async": (Activity.WAIT, "<module>"),
    "batch_isend_irecv": (Activity.WAIT, "<listcomp>"),
    "store_get": (Activity.WAIT, "train"),
    "lock": (Activity.WAIT, "train"),
    "ddp_backward": (Activity.BACKWARD, "_engine_run_backward"),
    "matrix_backward": (Activity.BACKWARD, "_engine_run_backward"),
    "loader_slow_worker": (Activity.DATA, "_try_get_data"),
    "loader_dead_worker": (Activity.DATA, "_try_get_data"),
    "loader_stopped_worker": (Activity.DATA, "_try_get_data"),
    "loader_in_process": (Activity.DATA, "_next_data"),
    "event": (Activity.LOCK, "wait"),
    "queue": (Activity.LOCK, "wait"),
    "join": (Activity.LOCK, "_wait_for_tstate_lock"),
    "subprocess": (Activity.LOCK, "_try_wait"),
    "sleep": (Activity.SLEEP, "train"),
    "python_loop": (Activity.PYTHON, "train"),
    "native_loop": (Activity.NATIVE, "train"),
    "holds_gil": (Activity.NATIVE, "train"),
    "optimizer": (Activity.OPTIMIZER, None),
    "save_to_fifo": (Activity.CHECKPOINT, "save"),
    "read_fifo": (Activity.FILE, None),
    "read_socket": (Activity.FILE, None),
    "compile": (Activity.COMPILE, None),
    "stopped": (Activity.STOPPED, ""),
    "d_state": (Activity.FILE, None),
}


def calls(found: Look) -> tuple[tree.Call, ...]:
    return tuple((frame.function, frame.file, frame.line) for frame in looks.telling(found))


def doing(found: Look) -> Doing:
    main = looks.main_thread(found)
    told = activity.doing(
        calls(found),
        state=found.state,
        wchan=found.wchan,
        gil=main.gil if main is not None else None,
    )
    children = [
        activity.Process(pid=child.pid, state=child.state, command=child.command)
        for child in found.children
    ]
    return activity.beside(told, children)


def recorded(name: str) -> Look:
    loaded: Look = codec.loads(Look, (HERE / f"{name}.json").read_text())
    return loaded


def test_every_program_is_recorded_and_expected() -> None:
    assert set(PROGRAMS) == set(EXPECTED) == {file.stem for file in HERE.glob("*.json")}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recorded_rank_is_known_for_what_it_does(name: str) -> None:
    told = doing(recorded(name))
    expected, function = EXPECTED[name]
    assert told.activity is expected, told
    assert function is None or told.name == function
    assert told.waits_for_others == (expected in (Activity.COLLECTIVE, Activity.P2P))


@pytest.mark.parametrize("name", EXPECTED)
def test_the_scripts_own_line_is_named(name: str) -> None:
    told = doing(recorded(name))
    assert told.call is not None
    assert told.call[1] == "/job/train.py"
    assert told.call[2] > 0


def test_a_stack_as_faulthandler_tells_it_is_known_as_well() -> None:
    """It has bare names, and knows nothing of the GIL."""
    for name, (expected, _) in EXPECTED.items():
        found = recorded(name)
        stack = [(tree.bare(function), file, line) for function, file, line in calls(found)]
        told = activity.doing(stack, state=found.state, wchan=found.wchan)
        alike = {Activity.NATIVE: {Activity.PYTHON, Activity.SLEEP}}.get(expected, set())
        assert told.activity in {expected} | alike, name


@pytest.mark.parametrize("name", ["loader_slow_worker", "loader_dead_worker"])
def test_torchdatas_loader_is_one_like_torchs(name: str) -> None:
    """It has a copy of its code."""
    ours, theirs = (
        "torch/utils/data/dataloader.py",
        "torchdata/stateful_dataloader/stateful_dataloader.py",
    )
    found = recorded(name)
    stack = [(function, file.replace(ours, theirs), line) for function, file, line in calls(found)]
    assert any(file.endswith(theirs) for _, file, _ in stack)
    told = activity.doing(stack, state=found.state, wchan=found.wchan)
    assert (told.activity, told.name) == (Activity.DATA, "_try_get_data")


def test_who_waits_for_a_work_of_its_own_waits_for_others() -> None:
    """Gloo's recorder knows no sends and receives; the frame around `Work.wait` is ours, and has its name."""
    found = recorded("batch_isend_irecv")
    ours = waits._Clock.timed.__code__.co_consts
    (function,) = [
        one.co_name for one in ours if isinstance(one, CodeType) and one.co_name != "<lambda>"
    ]
    frame = (f"_Clock.timed.<locals>.{function}", "/site-packages/elastic/agent/waits.py", 58)
    told = activity.doing((frame, *calls(found)), state=found.state, wchan=found.wchan)
    assert (told.activity, told.name) == (Activity.P2P, "wait")
    assert told.waits_for_others
    assert not activity.doing(calls(found), state=found.state, wchan=found.wchan).waits_for_others
    reduces = activity.doing((frame, *calls(recorded("all_reduce"))), state="S")
    assert (reduces.activity, reduces.name) == (Activity.COLLECTIVE, "all_reduce")


def workers(name: str) -> str:
    return "".join(sorted(worker.state for worker in doing(recorded(name)).workers))


def test_the_loaders_workers_are_told_of() -> None:
    assert workers("loader_slow_worker") == "SS"
    assert workers("loader_dead_worker") == "ZZ"
    assert workers("loader_stopped_worker") == "TT"
    assert workers("loader_in_process") == ""


@pytest.mark.parametrize(
    ("state", "expected"),
    [("", Activity.GONE), ("Z", Activity.GONE), ("T", Activity.STOPPED), ("t", Activity.STOPPED),
     ("D", Activity.FILE), ("S", Activity.UNKNOWN), ("R", Activity.UNKNOWN)],
)  # fmt: skip
def test_without_a_stack_the_kernel_tells(state: str, expected: Activity) -> None:
    assert activity.doing((), state=state).activity is expected


def test_a_step_that_runs_the_loss_again_is_a_backward() -> None:
    """As LBFGS does: the innermost that tells, tells."""
    torch = "/venv/site-packages/torch"
    stack = (
        ("_engine_run_backward", f"{torch}/autograd/graph.py", 979),
        ("closure", "/job/train.py", 5),
        ("LBFGS.step", f"{torch}/optim/lbfgs.py", 300),
        ("<module>", "/job/train.py", 9),
    )
    assert activity.doing(stack, state="R").activity is Activity.BACKWARD
    assert activity.doing(stack[2:], state="R").activity is Activity.OPTIMIZER


def test_a_rank_that_runs_through_one_loop_has_not_moved() -> None:
    before = (("f", "/job/a.py", 3), ("<module>", "/job/a.py", 9))
    assert not activity.moved(before, (("f", "/job/a.py", 4), ("<module>", "/job/a.py", 9)))
    assert not activity.moved(before, (("A.f", "/job/a.py", 3), ("<module>", "/job/a.py", 9)))
    assert activity.moved(before, (("g", "/job/a.py", 3), ("<module>", "/job/a.py", 9)))
    assert activity.moved(before, before[1:])
    assert activity.moved(before, (("f", "/job/b.py", 3), ("<module>", "/job/a.py", 9)))


def test_who_used_the_processor_worked() -> None:
    assert activity.worked(1.0, 1.5, seconds=0.5)
    assert not activity.worked(1.0, 1.01, seconds=0.1)  # one tick, which any wait may take
    assert not activity.worked(1.0, 1.0, seconds=10.0)


LIVE = [
    "all_reduce", "recv", "loader_stopped_worker", "sleep", "python_loop", "holds_gil", "stopped",
    "d_state", "read_fifo", "save_to_fifo",
]  # fmt: skip


@pytest.mark.parametrize("name", LIVE)
def test_a_living_rank_is_known_for_what_it_does_and_does_not_move(
    name: str, tmp_path: Path
) -> None:
    ranks = record.Ranks(name, tmp_path)
    try:
        found = ranks.settle()
        second = record.settled(found.pid, PROGRAMS[name])
    finally:
        ranks.end()
    assert doing(found).activity is EXPECTED[name][0], doing(found)
    assert not activity.moved(calls(found), calls(second))
    seconds = second.at - found.at
    worked = activity.worked(found.main_cpu_seconds, second.main_cpu_seconds, seconds=seconds)
    assert worked == (name == "python_loop"), (found.main_cpu_seconds, second.main_cpu_seconds)


NATIVE = {
    "all_reduce_async": Activity.COLLECTIVE,
    "ddp_backward": Activity.COLLECTIVE,
    "lock": Activity.LOCK,
    "sleep": Activity.SLEEP,
    "native_loop": Activity.NATIVE,
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_frames_tell_what_python_does_not_show(name: str, tmp_path: Path) -> None:
    async def close(pid: int) -> Look:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 60
        while True:
            (found,) = await Looker().look({0: pid}, native=[0], deadline=deadline)
            if found.state != "D" or loop.time() > deadline:  # it has its memory back from the disk
                return found

    ranks = record.Ranks(name, tmp_path)
    try:
        found = asyncio.run(close(ranks.settle().pid))
    finally:
        ranks.end()
    assert found.native, found.problem
    assert doing(found).activity is NATIVE[name], json.loads(codec.dumps(found))

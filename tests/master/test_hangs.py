"""Whether a round hangs, and who makes it: looks by hand, and a clock that is a number."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from elastic.master import hangs, messages
from elastic.master.activity import Activity, Doing, OnDevice, Process, doing
from elastic.master.culprits import (
    FOREVER,
    LONG,
    UNSTEPPED_PATIENCES,
    Found,
    Patience,
    account,
    find,
)
from elastic.master.events import NodeId
from elastic.master.hangs import Decision, Examine, Facts, State, Verdict, patience, suspects_at
from elastic.master.policy import Policy
from elastic.master.rendezvous import Seat
from elastic.master.seen import ENOUGH, Collective, Seen
from elastic.master.tree import Call
from elastic.proto import codec
from elastic.proto.looks import Look as RankLook
from elastic.proto.phases import LEAVING, PERSISTING

POLICY = Policy(hang_floor=1.2)
REDUCE = Collective(group="0", seq=41, op="gloo:all_reduce", sizes="[[4]]", done=False)
BARRIER = replace(REDUCE, op="gloo:barrier", sizes="[]")


STACK = (
    ("all_reduce", "/torch/distributed/distributed_c10d.py", 5),
    ("main", "train.py", 9),
)


def _workers(told: object) -> tuple[Process, ...]:
    """Or the letter of each: a zombie has failed."""
    if isinstance(told, tuple):
        return told
    return tuple(
        Process(pid=pid, state=letter, command="pt_data_worker", failed=letter == "Z")
        for pid, letter in enumerate(str(told))
    )


def seen(rank: int, activity: Activity = Activity.COLLECTIVE, **more: object) -> Seen:
    """A rank that waits in an all-reduce, two to a node, but for what is said otherwise."""
    waits = activity is Activity.COLLECTIVE
    doing = Doing(
        activity=activity,
        name=str(more.pop("name", "all_reduce" if waits else "")),
        asleep=bool(more.pop("asleep", waits)),
        call=("main", "train.py", 9),
        workers=(workers := _workers(more.pop("workers", ""))),
        helped=bool(more.pop("helped", any(one.state == "R" for one in workers))),
    )
    usual: dict[str, object] = {
        "state": "S",
        "stack": STACK,
        "ticks": 40,
        "collectives": (REDUCE,) if waits else None,
    }
    return Seen(rank=rank, node=NodeId("ab"[rank // 2]), doing=doing, **usual | more)  # type: ignore[arg-type]


def looks(*last: Seen, before: Mapping[int, Seen] | None = None) -> dict[int, tuple[Seen, ...]]:
    """Two looks at each rank; before: where the first was another."""
    first = {one.rank: one for one in last} | dict(before or {})
    return {one.rank: (first[one.rank], replace(one, at=first[one.rank].at + 1.0)) for one in last}


def found(
    *last: Seen,
    quiet: float = 5.0,
    before: Mapping[int, Seen] | None = None,
    phases: Mapping[int, str] | None = None,
    judged: float = 0.0,
    stepped: bool = True,
    phase_seconds: Mapping[str, float] | None = None,
) -> Found | None:
    """judged: seconds of the verdict before at the same place."""
    here = {"train.py in main": judged}
    patience = Patience(
        allowed=1.2,
        stepped=stepped,
        phases=phases or {},
        judged=here,
        phase_seconds=phase_seconds or {},
    )
    return find(looks(*last, before=before), quiet, patience)


def ranks(*last: Seen, **more: object) -> tuple[int, ...] | None:
    one = found(*last, **more)  # type: ignore[arg-type]
    return None if one is None else one.ranks


WAITING = (seen(0), seen(1), seen(2))


def test_who_is_stopped_is_named_before_the_patience_is_over() -> None:
    culprit = seen(3, Activity.STOPPED, state="T")
    assert ranks(*WAITING, culprit, quiet=0.7) == (3,)
    once = {3: seen(3)}
    assert ranks(*WAITING, culprit, quiet=0.7, before=once) is None, "it was not a look before"


def test_who_does_not_move_while_the_others_wait_is_named() -> None:
    one = found(*WAITING, seen(3, Activity.PYTHON, name="endless"))
    assert one is not None
    assert (one.ranks, one.nodes, one.places) == ((3,), ("b",), ("train.py in main",))
    assert one.reason == (
        "rank 3 on b does not go on: endless, in train.py:9 in main; 3 of 3 others: all_reduce "
        "(all_reduce #41 of [[4]]), in train.py:9 in main"
    )


@pytest.mark.parametrize(
    "before",
    [
        seen(3, Activity.PYTHON, ticks=39),
        seen(3, Activity.PYTHON, stack=(("other", "train.py", 3),)),
        seen(3, Activity.PYTHON, collectives=(replace(REDUCE, seq=40),)),
    ],
)
def test_who_moves_is_not_named(before: Seen) -> None:
    now = seen(3, Activity.PYTHON, collectives=(REDUCE,))
    assert ranks(*WAITING, now) == (3,)
    assert ranks(*WAITING, now, before={3: before}) is None


def test_what_was_not_seen_at_one_look_shows_no_move() -> None:
    before = {3: seen(3, Activity.PYTHON, stack=(), collectives=None)}
    assert ranks(*WAITING, seen(3, Activity.PYTHON, collectives=(REDUCE,)), before=before) == (3,)


def test_all_that_wait_and_move_are_none_that_hang() -> None:
    """Looks at ranks are not at one instant, so they may be seen in different collectives."""
    first = {rank: seen(rank, collectives=(replace(REDUCE, seq=40),)) for rank in range(4)}
    later = [seen(rank, collectives=(replace(REDUCE, seq=900),)) for rank in range(3)]
    later.append(seen(3, collectives=(replace(BARRIER, seq=900),)))
    assert ranks(*later, before=first, quiet=9999.0) is None
    assert ranks(*later, quiet=5.0) == (3,)
    assert ranks(*later, quiet=5.0, phases={0: "evaluate"}) is None


def test_nobody_is_named_within_the_patience_or_by_one_look() -> None:
    assert ranks(*WAITING, seen(3, Activity.PYTHON), quiet=1.1) is None
    single = {one.rank: (one,) for one in (*WAITING, seen(3, Activity.STOPPED, state="T"))}
    patience = Patience(allowed=1.2, stepped=True, phases={}, judged={})
    assert find(single, 5.0, patience) is None


@pytest.mark.parametrize("doing", [Activity.COMPILE, Activity.CHECKPOINT, Activity.DATA])
def test_what_takes_long_for_a_reason_gets_long(doing: Activity) -> None:
    culprit = seen(3, doing, name="_try_get_data", workers="SS")
    assert ranks(*WAITING, culprit, quiet=LONG - 1) is None
    assert ranks(*WAITING, culprit, quiet=LONG) == (3,)


@pytest.mark.parametrize("doing", [Activity.CHECKPOINT, Activity.DATA, Activity.SLEEP])
def test_what_took_too_long_for_a_reason_gets_longer_the_next_time(doing: Activity) -> None:
    """As a script's own: a file of 10 GB may take more than a minute each time."""
    culprit = seen(3, doing, name="_try_get_data", workers="SS", asleep=True)
    assert ranks(*WAITING, culprit, quiet=4 * LONG - 1, judged=LONG) is None
    assert ranks(*WAITING, culprit, quiet=4 * LONG, judged=LONG) == (3,)


def test_who_works_at_it_may_take_as_long_as_a_model() -> None:
    saves, saved = seen(3, Activity.CHECKPOINT), seen(3, Activity.CHECKPOINT, cpu=0.9)
    loads = seen(3, Activity.DATA, name="_try_get_data", workers="RS")
    named = {"phases": {3: "evaluate"}}
    for before, now, more in ((saves, saved, {}), (loads, loads, {}), (saves, saved, named)):
        assert ranks(*WAITING, now, before={3: before}, quiet=FOREVER - 1, **more) is None
        assert ranks(*WAITING, now, before={3: before}, quiet=FOREVER, **more) == (3,)


def test_a_phase_may_take_three_times_as_long_as_ever() -> None:
    sleeps = seen(3, Activity.SLEEP, asleep=True)
    known = {"evaluate": 100.0, "upload": 1.0}
    more = {"phases": {3: "evaluate"}, "phase_seconds": known}
    assert ranks(*WAITING, sleeps, quiet=299.0, **more) is None
    assert ranks(*WAITING, sleeps, quiet=300.0, **more) == (3,)
    more["phases"] = {3: "upload"}
    assert ranks(*WAITING, sleeps, quiet=LONG, **more) == (3,)


def test_two_looks_in_one_moment_are_one() -> None:
    culprit = seen(3, Activity.PYTHON)
    at_once = {one.rank: (one, replace(one, at=0.1)) for one in (*WAITING, culprit)}
    patience = Patience(allowed=1.2, stepped=True, phases={}, judged={})
    assert find(at_once, 5.0, patience) is None


def test_a_debugger_may_hold_a_rank() -> None:
    assert ranks(*WAITING, seen(3, Activity.STOPPED, state="t")) is None
    assert ranks(*WAITING, seen(3, Activity.STOPPED, state="t"), quiet=LONG) == (3,)


@pytest.mark.parametrize("doing", [Activity.SLEEP, Activity.LOCK, Activity.FILE, Activity.WAIT])
def test_what_sleeps_may_wait_for_something_that_is_no_rank(doing: Activity) -> None:
    assert ranks(*WAITING, seen(3, doing, asleep=True), quiet=LONG - 1) is None
    assert ranks(*WAITING, seen(3, doing, asleep=True), quiet=LONG) == (3,)
    assert ranks(*WAITING, seen(3, Activity.NATIVE)) == (3,), "it keeps the GIL"


@pytest.mark.parametrize("name", ["evaluate", "Trainer._evaluate_all", "validate", "save_model"])
def test_a_function_that_does_something_besides_training_gets_long(name: str) -> None:
    culprit = seen(3, Activity.PYTHON, stack=(("count", "train.py", 3), (name, "train.py", 9)))
    assert ranks(*WAITING, culprit) is None
    assert ranks(*WAITING, culprit, quiet=LONG) == (3,)


MODULE = "/lib/torch/nn/modules/module.py"


@pytest.mark.parametrize(
    "layers",
    [
        (("checkpoint", "megatron/random.py", 4), ("_checkpointed_forward", "block.py", 7), ("_call_impl", MODULE, 1)),
        (("predict", "model.py", 4), ("_call_impl", MODULE, 1), ("forward", "model.py", 9), ("_call_impl", MODULE, 1)),
        (("checkpoint", "/lib/torch/utils/checkpoint.py", 4),),
    ],
)  # fmt: skip
def test_what_a_model_calls_its_layers_says_nothing(layers: tuple[Call, ...]) -> None:
    """What recomputes activations is a checkpoint to all libraries."""
    culprit = seen(3, Activity.PYTHON, stack=(*layers, ("main", "train.py", 9)))
    assert ranks(*WAITING, culprit) == (3,)
    evaluates = replace(culprit, stack=(*layers, ("evaluate", "train.py", 9)))
    assert ranks(*WAITING, evaluates) is None


def test_before_its_first_step_a_rank_may_do_what_it_likes() -> None:
    assert ranks(*WAITING, seen(3, Activity.PYTHON), quiet=9999.0, stepped=False) is None
    assert ranks(*WAITING, seen(3, Activity.STOPPED, state="T"), stepped=False) == (3,)


def test_a_verdict_that_may_have_been_wrong_makes_the_next_one_there_wait() -> None:
    culprit = seen(3, Activity.PYTHON)
    assert ranks(*WAITING, culprit, quiet=4.7, judged=1.2) is None
    assert ranks(*WAITING, culprit, quiet=4.8, judged=1.2) == (3,)
    assert ranks(*WAITING, culprit, quiet=19.1, judged=4.8) is None


def test_a_phase_that_the_script_names_gets_long() -> None:
    culprit = seen(3, Activity.PYTHON)
    assert ranks(*WAITING, culprit, phases={3: "evaluate"}) is None
    assert ranks(*WAITING, culprit, phases={3: "evaluate"}, quiet=LONG) == (3,)


@pytest.mark.parametrize("workers", ["", "S", "ST", "SZ", "DS"])
def test_a_loader_whose_worker_will_not_come_back(workers: str) -> None:
    def waits(workers: str) -> Seen:
        return seen(3, Activity.DATA, name="_try_get_data", workers=workers)

    before = {3: waits("DS" if workers == "DS" else "SS")}
    assert ranks(*WAITING, waits(workers), before=before) == (3,)
    assert ranks(*WAITING, waits("DS"), before={3: waits("SS")}) is None, "it reads a disk"
    assert ranks(*WAITING, waits("")) is None, "they are still to begin"
    assert ranks(*WAITING, seen(3, Activity.DATA, name="_next_data")) is None, "it has none"


def test_workers_that_read_a_slow_disk_in_turns_and_one_that_is_done_are_not_lost() -> None:
    def waits(*workers: Process) -> Seen:
        return seen(3, Activity.DATA, name="_try_get_data", workers=workers)

    def worker(pid: int, state: str, **more: Any) -> Process:
        return Process(pid=pid, state=state, command="pt_data_worker", **more)

    others = waits(worker(1, "D"), worker(2, "S"))
    assert ranks(*WAITING, waits(worker(1, "S"), worker(2, "D")), before={3: others}) is None
    again = waits(worker(1, "D", switches=7), worker(2, "S"))
    assert ranks(*WAITING, again, before={3: others}) is None, "it has run in between"
    done = waits(worker(1, "S"), worker(2, "Z"))
    assert ranks(*WAITING, done) is None, "torch leaves it until all have come to their end"
    assert ranks(*WAITING, waits(worker(1, "S"), worker(2, "Z", failed=True))) == (3,)


def test_a_stopped_worker_of_a_loader_is_evidence_at_once() -> None:
    """Whatever was judged at this place before, and it makes no later verdict there wait."""

    def waits(workers: str, **more: object) -> Seen:
        return seen(3, Activity.DATA, name="_try_get_data", workers=workers, **more)

    stopped = (*WAITING, waits("ST"))
    assert ranks(*stopped, quiet=0.7, judged=2) == (3,)
    one = found(*stopped, quiet=0.7)
    assert one is not None
    assert not one.soft
    assert one.reason.startswith(
        "rank 3 on b does not go on, for a worker of its loader is stopped: "
    )
    assert ranks(*stopped, before={3: waits("SS")}, quiet=0.7) is None, "it may not last"
    assert ranks(*stopped, before={3: waits("ST", ticks=-1)}, quiet=0.7) is None, "it goes on"
    assert ranks(*WAITING, waits("SZ"), quiet=0.7) is None, "it may have come to its end"


def test_a_disk_that_does_not_answer_and_one_that_is_slow_to_save() -> None:
    assert ranks(*WAITING, seen(3, Activity.FILE, state="D")) == (3,)
    worked = {3: seen(3, Activity.FILE, state="D", cpu=-1.0)}
    assert ranks(*WAITING, seen(3, Activity.FILE, state="D"), before=worked) is None
    assert ranks(*WAITING, seen(3, Activity.FILE, state="D"), phases={3: "saves"}) is None
    assert ranks(*WAITING, seen(3, Activity.CHECKPOINT, state="D")) is None


def test_who_writes_to_a_slow_disk_or_waits_for_threads_that_upload_works() -> None:
    """For as long as bytes go on."""
    for culprit in (
        seen(3, Activity.CHECKPOINT, state="D", io=9 << 20),
        seen(3, Activity.FILE, state="D", io=9 << 20),
        seen(3, Activity.LOCK, asleep=True, io=9 << 20),
    ):
        before = {3: replace(culprit, io=7 << 20)}
        assert ranks(*WAITING, culprit, before=before, quiet=FOREVER - 1) is None
        assert ranks(*WAITING, culprit, before=before, quiet=FOREVER) == (3,)
        barely = {3: replace(culprit, io=culprit.io - 1000)}
        assert ranks(*WAITING, culprit, before=barely, quiet=LONG) == (3,)


def test_who_waits_for_a_process_that_uploads_or_writes_works_as_long_as_that_does() -> None:
    """Asleep for most of the time."""
    waits = seen(3, Activity.LOCK, asleep=True, helpers_io=9 << 20, helpers_cpu=2.0)
    for before in (replace(waits, helpers_io=7 << 20), replace(waits, helpers_cpu=1.9)):
        assert ranks(*WAITING, waits, before={3: before}, quiet=FOREVER - 1) is None
        assert ranks(*WAITING, waits, before={3: before}, quiet=FOREVER) == (3,)
    barely = replace(waits, helpers_io=waits.helpers_io - 1000, helpers_cpu=1.99)
    assert ranks(*WAITING, waits, before={3: barely}, quiet=LONG) == (3,)


def test_what_processes_do_that_a_rank_began_excuses_none_that_does_not_wait_for_them() -> None:
    """A loader's workers fill their queue, whatever holds the rank up."""
    for culprit in (
        seen(3, Activity.NATIVE, asleep=True, helpers_io=9 << 20, helpers_cpu=2.0),
        seen(3, Activity.FILE, state="D", helpers_io=9 << 20, helpers_cpu=2.0),
    ):
        before = {3: replace(culprit, helpers_io=0, helpers_cpu=0.0)}
        assert ranks(*WAITING, culprit, before=before) == (3,)


def test_what_may_be_wrong_gets_ten_minutes_at_most() -> None:
    """As long as a group waits by default: what stands for longer is a hang, and the third time ends the job."""
    sleeps = seen(3, Activity.LOCK, asleep=True)
    loops = seen(3, Activity.PYTHON)
    for culprit, first in ((sleeps, LONG), (loops, 1.2)):
        judged, waits = 0.0, []
        for _ in range(7):
            limits = limits_of({3: culprit}, judged)
            judged = limits.of((replace(culprit, at=0.0), replace(culprit, at=1.0)))
            waits.append(judged)
        assert waits[0] == first
        assert waits[-2:] == [FOREVER] * 2


def limits_of(seen: Mapping[int, Seen], judged: float) -> Patience:
    places = dict.fromkeys((one.place for one in seen.values()), judged)
    return Patience(allowed=1.2, stepped=True, phases={}, judged=places)


def test_a_model_that_computes_looks_alike_whether_it_goes_on_or_not() -> None:
    busy, before = seen(3, Activity.BACKWARD, cpu=2.0), {3: seen(3, Activity.BACKWARD, cpu=1.0)}
    assert ranks(*WAITING, busy, before=before, quiet=FOREVER - 1) is None
    assert ranks(*WAITING, busy, before=before, quiet=FOREVER) == (3,)
    assert ranks(*WAITING, busy) == (3,), "it computes nothing"


PYTHON, LIBRARY = Activity.PYTHON, Activity.NATIVE


@pytest.mark.parametrize(
    ("activities", "named"),
    [
        ((PYTHON,) * ENOUGH, True),
        ((PYTHON,) * (ENOUGH - 1), False),
        ((LIBRARY, *(PYTHON,) * (ENOUGH - 1)), False),
        ((*(PYTHON,) * (ENOUGH - 1), LIBRARY), False),
    ],
)
def test_who_works_is_named_once_enough_looks_show_python_alone(
    activities: tuple[Activity, ...], named: bool
) -> None:
    """What evaluates in one small function is in Python's code between two calls, at any look."""
    works = tuple(
        seen(3, activity, at=float(n), cpu=float(n)) for n, activity in enumerate(activities)
    )
    patience = Patience(allowed=1.2, stepped=True, phases={}, judged={})
    one = find(looks(*WAITING) | {3: works}, 5.0, patience)
    assert (one is not None) is named


def test_who_waits_for_a_program_that_works_may_wait_as_long_as_that() -> None:
    """A compiler's, that takes minutes."""
    compiles = [seen(k, Activity.COMPILE, asleep=True, helped=True) for k in range(4)]
    assert ranks(*compiles, quiet=FOREVER - 1) is None
    idle = [seen(k, Activity.COMPILE, asleep=True) for k in range(4)]
    assert ranks(*idle, quiet=LONG) == (0, 1, 2, 3)


def test_who_sleeps_in_a_backward_pass_waits_for_others_though_it_does_not_say_for_what() -> None:
    unsaid = seen(0, Activity.BACKWARD, asleep=True, collectives=None, free=True)
    locked = seen(3, Activity.LOCK, asleep=True)
    assert ranks(unsaid, *WAITING[1:], locked, quiet=LONG - 1) is None
    assert ranks(unsaid, *WAITING[1:], locked, quiet=LONG) == (3,)
    keeps_the_gil = replace(unsaid, free=False)  # which is why it says nothing
    assert ranks(keeps_the_gil, *WAITING[1:], seen(3)) == (0,)


def test_each_place_of_those_that_are_named_is_told() -> None:
    other = replace(REDUCE, op="gloo:barrier", sizes="[]")
    two = (
        seen(0),
        replace(seen(1), collectives=(other,), doing=replace(seen(1).doing, name="barrier")),
    )
    one = found(*two)
    assert one is not None
    assert one.ranks == (0, 1)
    assert "all_reduce" in one.reason
    assert " | barrier (barrier #41" in one.reason


def test_who_has_no_processor_is_given_its_time_all_the_same() -> None:
    """As on a machine that does ten things at once: each takes ten times as long."""
    computes = seen(1, Activity.PYTHON, state="R", asleep=False)
    for delay, named in ((0.0, True), (0.4, True), (0.9, False)):
        later = [
            replace(computes, at=0.5 * k, taken=0.5 * k, cpu=0.1 * k, run_delay=0.5 * k * delay)
            for k in range(4)
        ]
        all_of_them = looks(seen(0), seen(2)) | {1: tuple(later)}
        named_now = find(
            all_of_them, 5.0, Patience(allowed=2.0, stepped=True, phases={}, judged={})
        )
        assert (named_now is not None) is named
        assert find(all_of_them, 50.0, Patience(allowed=2.0, stepped=True, phases={}, judged={}))


def test_a_rank_without_a_stack_begins_or_ends() -> None:
    assert ranks(*WAITING, seen(3, Activity.PYTHON, stack=())) is None


@pytest.mark.parametrize(
    "other",
    [
        BARRIER,
        replace(REDUCE, sizes="[[3]]"),
        replace(REDUCE, seq=42, before="gloo:broadcast [[4]]"),  # its root has done its part
    ],
)
def test_who_waits_in_another_collective_is_named(other: Collective) -> None:
    assert ranks(*WAITING, seen(3, collectives=(other,))) == (3,)


@pytest.mark.parametrize(
    "other",
    [
        replace(REDUCE, seq=42, op="gloo:barrier", before=REDUCE.kind),
        replace(REDUCE, seq=42),
        replace(REDUCE, seq=43, before="gloo:broadcast [[4]]"),
        replace(REDUCE, seq=40),
    ],
)
def test_who_is_further_or_behind_waits_not_apart(other: Collective) -> None:
    """The root of a broadcast is further than those that wait for another rank's part of it; and what a rank is
    further by two had at their number is not known."""
    assert ranks(*WAITING, seen(3, collectives=(other,))) is None


@pytest.mark.parametrize("op", ["gloo:all_to_all", "nccl:all_to_all", "gloo:scatter"])
def test_ranks_exchange_as_much_as_each_has(op: str) -> None:
    """A token's experts, say: other sizes are no other collective."""
    exchange = replace(REDUCE, op=op)
    every = [seen(rank, collectives=(replace(exchange, sizes=f"[[{rank}]]"),)) for rank in range(3)]
    assert ranks(*every, seen(3, collectives=(replace(exchange, sizes="[[9]]"),))) is None
    one = found(*every, seen(3, collectives=(REDUCE,)))
    assert one is not None
    assert one.ranks == (3,)


def test_who_is_to_leave_waits_for_that_for_as_long_as_it_takes() -> None:
    culprits = [seen(rank, Activity.LOCK, asleep=True) for rank in range(4)]
    assert ranks(*culprits, quiet=LONG + 1) == (0, 1, 2, 3)
    for phase in (LEAVING, PERSISTING):
        leaving = dict.fromkeys(range(4), phase)
        assert ranks(*culprits, quiet=3600.0, phases=leaving) is None
    saying = dict.fromkeys(range(4), "persist")  # a script of its own accord
    assert ranks(*culprits, quiet=LONG + 1, phases=saying) == (0, 1, 2, 3)
    del leaving[2]
    assert ranks(*culprits, quiet=LONG + 1, phases=leaving) == (2,)


def test_nobody_waits_for_a_rank_while_others_finish_steps() -> None:
    """It has ended its data, or does something of its own."""
    culprit = seen(3, Activity.PYTHON)
    patience = Patience(allowed=1.2, stepped=True, phases={}, judged={})
    before = {rank: seen(rank, ticks=30) for rank in range(3)}
    assert ranks(*WAITING, culprit) == (3,)
    assert find(looks(*WAITING, culprit, before=before), 5.0, patience) is None


def test_who_is_further_than_a_rank_whose_device_is_held_up_is_not_named_for_it() -> None:
    broadcast = replace(REDUCE, op="nccl:broadcast", device=True, started=True)
    root = replace(broadcast, seq=42, op="nccl:all_reduce", before=broadcast.kind)
    late = seen(1, collectives=(replace(broadcast, started=False),))
    others = (seen(rank, collectives=(broadcast,)) for rank in (2, 3))
    assert ranks(seen(0, collectives=(root,)), late, *others) == (1,)


FORGOTTEN = replace(REDUCE, seq=0, op="", sizes="", device=True)


@pytest.mark.parametrize("forgetful", [(2,), (0, 1, 2)])
def test_who_does_not_remember_what_its_device_is_at_waits_all_the_same(
    forgetful: tuple[int, ...],
) -> None:
    """Its device is held up by the rank that loops."""
    others = [
        seen(
            rank, Activity.NATIVE, on_device=OnDevice.HELD,
            collectives=(FORGOTTEN if rank in forgetful else replace(REDUCE, device=True),),
        )
        for rank in range(3)
    ]  # fmt: skip
    assert ranks(*others, seen(3, Activity.PYTHON)) == (3,)


def test_who_does_not_remember_may_say_otherwise() -> None:
    on_device = [seen(rank, collectives=(replace(REDUCE, device=True),)) for rank in range(2)]
    forgets = seen(2, collectives=(FORGOTTEN,))
    apart = seen(3, collectives=(replace(BARRIER, device=True),))
    assert ranks(*on_device, forgets, apart) is None
    assert ranks(*on_device, forgets, apart, quiet=LONG) == (3,)


def test_who_waits_where_no_stack_tells_is_known_by_what_it_has_issued() -> None:
    backward = seen(3, Activity.BACKWARD, asleep=True, collectives=(REDUCE,))
    assert ranks(*WAITING, backward) is None
    assert ranks(*WAITING, seen(3, Activity.BACKWARD, asleep=True, collectives=())) == (3,)


def test_who_has_not_begun_a_collective_on_its_device_has_a_kernel_before_it() -> None:
    begun = replace(REDUCE, device=True, started=True)
    late = replace(begun, started=False)
    others = [seen(rank, collectives=(begun,)) for rank in range(3)]
    assert ranks(*others, seen(3, collectives=(late,))) == (3,)
    assert ranks(*others, seen(3, collectives=(begun,))) is None
    assert ranks(others[0], seen(1, collectives=(late,))) == (1,)
    assert ranks(*(seen(rank, collectives=(late,)) for rank in range(4))) is None
    compiling = seen(3, Activity.COMPILE, collectives=(late,))
    assert (ranks(*others, compiling), ranks(*others, compiling, quiet=LONG)) == (None, (3,))


def test_a_host_that_waits_for_a_kernel_that_does_not_end() -> None:
    """In `loss.item()`, awake, before it has issued what the others wait for: as a model does that computes."""
    done = (replace(REDUCE, device=True, done=True),)
    spins = seen(3, Activity.NATIVE, collectives=done, state="R", on_device=OnDevice.HELD)
    work = {3: replace(spins, cpu=-1.0, on_device=OnDevice.BUSY)}
    assert ranks(*WAITING, spins, before=work, quiet=1.1) is None
    one = found(*WAITING, spins, before=work, quiet=1.2)
    assert one is not None
    assert (one.ranks, one.machine) == ((3,), True)
    assert "a kernel on its device does not end" in one.reason
    goes_on = replace(spins, on_device=OnDevice.BUSY)
    assert ranks(*WAITING, goes_on, before=work, quiet=FOREVER - 1) is None


@pytest.mark.parametrize(
    ("on_device", "said"),
    [(OnDevice.IDLE, "its device has nothing to do"), (OnDevice.UNKNOWN, "python, in train.py")],
)
def test_a_host_that_is_stuck_is_no_fault_of_its_device(on_device: OnDevice, said: str) -> None:
    one = found(*WAITING, seen(3, Activity.PYTHON, on_device=on_device))
    assert one is not None
    assert (one.ranks, one.machine) == ((3,), False)
    assert said in one.reason
    assert "kernel" not in one.reason


def test_a_collective_that_waits_is_no_kernel_that_does_not_end() -> None:
    pending = (replace(REDUCE, device=True, started=True),)
    item = [
        seen(rank, Activity.PYTHON, collectives=pending, on_device=OnDevice.HELD)
        for rank in range(3)
    ]
    one = found(*item, seen(3, Activity.PYTHON, collectives=(), on_device=OnDevice.IDLE))
    assert one is not None
    assert (one.ranks, one.machine) == ((3,), False)
    assert "kernel" not in one.reason


def test_a_device_that_goes_on_has_no_kernel_that_does_not_end() -> None:
    """Batch after batch of an evaluation by one rank, in whose `loss.item()` its host is at each look."""
    done = (replace(REDUCE, device=True, done=True),)

    def named(*said: OnDevice) -> tuple[int, ...] | None:
        spins = [
            seen(
                3,
                Activity.NATIVE,
                collectives=done,
                state="R",
                on_device=one,
                cpu=0.25 * at,
                at=0.25 * at,
            )
            for at, one in enumerate(said)
        ]
        others = {rank: (seen(rank), seen(rank, at=1.0)) for rank in range(3)}
        patience = Patience(allowed=1.2, stepped=True, phases={}, judged={})
        one = find({**others, 3: (*spins,)}, 5.0, patience)
        return None if one is None else one.ranks

    busy, held, idle, unknown = OnDevice.BUSY, OnDevice.HELD, OnDevice.IDLE, OnDevice.UNKNOWN
    assert named(busy, held, held, held) == (3,)
    assert named(busy, unknown, held, held) == (3,), "it may not answer in time"
    assert named(held, held, busy, held) is None
    assert named(held, idle, busy, held) is None


def test_what_all_devices_are_at_may_well_end() -> None:
    """A queue that is long for once, on all of them: nobody waits for anybody."""
    done = (replace(REDUCE, device=True, done=True),)
    held = [
        seen(rank, Activity.NATIVE, collectives=done, state="R", on_device=OnDevice.HELD)
        for rank in range(4)
    ]
    assert ranks(*held, quiet=LONG - 1) is None
    assert ranks(*held, quiet=LONG) == (0, 1, 2, 3)
    assert ranks(*held[:3], seen(3, Activity.PYTHON), quiet=LONG - 1) is None


@pytest.mark.parametrize("more", [{"phases": {3: "evaluate"}}, {"stepped": False}])
def test_a_kernel_may_take_long_where_that_is_said_or_there_is_no_rhythm(
    more: dict[str, object],
) -> None:
    held = seen(3, Activity.PYTHON, on_device=OnDevice.HELD)
    assert ranks(*WAITING, held, quiet=LONG - 1, **more) is None


def test_who_waits_on_its_device_for_another_group_is_not_late() -> None:
    """A stage's data-parallel collective comes behind its send to a stage that does not take it."""
    begun = replace(REDUCE, device=True, started=True)
    late = replace(begun, started=False)
    send = replace(begun, group="1", op="nccl:send 0->3", seq=3, p2p=True)
    others = [seen(rank, collectives=(begun,)) for rank in range(2)]
    sends = seen(2, collectives=(late, send))
    assert ranks(*others, sends, seen(3, collectives=(late,))) == (3,)


def test_a_host_that_waits_for_its_device_may_be_in_any_line() -> None:
    """`loss.item()`: the main thread runs, and no call of torch's is on its stack."""
    pending = (replace(REDUCE, device=True),)
    item = [seen(rank, Activity.PYTHON, collectives=pending) for rank in range(3)]
    done = (replace(REDUCE, device=True, done=True),)
    assert ranks(*item, seen(3, Activity.PYTHON, collectives=done)) == (3,)
    assert ranks(*item, seen(3, Activity.PYTHON, collectives=pending)) is None
    receives = (replace(pending[0], p2p=True, seq=8, op="nccl:recv 0<-1"),)
    assert ranks(*item, seen(3, Activity.PYTHON, collectives=receives)) is None


DONE = replace(REDUCE, seq=40, done=True)


def waiting_for(
    rank: int, transfers: Mapping[int, tuple[int, int]] | None, last: Collective = DONE
) -> Seen:
    """transfers: by rank, what it has sent to it, and asked of it; last: what it has issued last in its group."""
    return seen(rank, name="wait_for_others", collectives=(last,), transfers=transfers)


def test_who_has_not_sent_what_another_waits_for_waits_apart() -> None:
    """It is in a collective, as others are: no number tells it apart. The first has sent what is still on its way to 1."""
    told = [
        waiting_for(0, {1: (7, 3)}, REDUCE),
        waiting_for(1, {0: (3, 6), 2: (40, 0)}, REDUCE),
        waiting_for(2, {1: (0, 41), 3: (40, 0)}),
        waiting_for(3, {2: (0, 41)}),
    ]
    one = found(*told)
    assert one is not None
    assert (one.ranks, one.machine, one.soft) == ((1,), False, True), one.reason
    assert one.reason.endswith("; rank 2 receives number 41 from rank 1, which has sent 40")
    assert ranks(*told, phases={1: "evaluate"}) is None
    assert ranks(*told, judged=1.2, quiet=4.7) is None, "it may have been wrong there"
    moving = {2: waiting_for(2, {1: (0, 40), 3: (40, 0)})}
    assert ranks(*told, before=moving) is None


@pytest.mark.parametrize("sends", [False, True])
def test_those_that_wait_for_one_another_wait_apart(sends: bool) -> None:
    """The third waits for one of them, and the last for all."""
    ahead = (5, 4) if sends else (4, 5)
    told = [
        waiting_for(0, {1: ahead}), waiting_for(1, {0: ahead, 2: (2, 0)}),
        waiting_for(2, {1: (0, 3)}), waiting_for(3, {}, REDUCE),
    ]  # fmt: skip
    one = found(*told)
    assert one is not None
    assert one.ranks == (0, 1)
    way = (
        "sends number 5 to rank 1, which has received 4"
        if sends
        else "receives number 5 from rank 1, which has sent 4"
    )
    assert one.reason.count(f"; rank 0 {way}; rank 1 ") == 1


def test_of_ten_thousand_it_takes_no_longer() -> None:
    """Each second one has begun a collective of all, which each of the others owes, waiting for what its neighbour has not sent."""
    told = [
        replace(seen(0), rank=rank, collectives=(REDUCE,), transfers={rank - 1: (0, 0)})
        if rank % 2
        else replace(seen(0), rank=rank, collectives=(DONE,), transfers={rank + 1: (0, 1)})
        for rank in range(10_000)
    ]
    assert ranks(*told) == tuple(range(1, 10_000, 2))


def test_nobody_owes_what_is_on_its_way() -> None:
    """A receive that is begun ahead while all wait in one collective; a message of which both ends are begun, and one that waits
    behind it; a stage whose replicas are in a collective of theirs, all of them. After long it may be
    what is between them, and nobody is named."""
    ahead = [waiting_for(0, {1: (0, 1)}, REDUCE), waiting_for(1, {}, REDUCE)]
    slow = [
        waiting_for(0, {1: (0, 1)}), waiting_for(1, {0: (0, 0), 2: (0, 4)}), waiting_for(2, {1: (4, 0)}),
    ]  # fmt: skip
    replicas = replace(REDUCE, group="dp")
    behind = [waiting_for(0, {1: (0, 1)}), *(waiting_for(rank, {}, replicas) for rank in (1, 2))]
    owed = "; rank 0 receives number 1 from rank 1, which has sent 0"
    for told, words in ((ahead, ""), (slow, owed), (behind, owed)):
        assert ranks(*told) is None
        one = found(*told, quiet=LONG)
        assert one is not None
        assert (one.ranks, one.machine) == ((), True), one.reason
        assert one.reason.endswith(f"in train.py:9 in main{words}")


def test_who_does_not_tell_of_transfers_may_have_had_a_part() -> None:
    told = [
        waiting_for(0, {1: (0, 1)}),
        waiting_for(1, {}, REDUCE),
        waiting_for(2, None, REDUCE),
    ]
    assert ranks(*told) is None
    assert ranks(*told, quiet=LONG) == (1,)


def test_of_two_that_wait_apart_nobody_can_say_which() -> None:
    assert ranks(seen(0), seen(1, collectives=(BARRIER,))) == (0, 1)


@pytest.mark.parametrize("unheard", [(), (0,), (0, 1)])
def test_nobody_waits_apart_of_whom_ranks_that_were_not_heard_may_say_otherwise(
    unheard: tuple[int, ...],
) -> None:
    """On a busy node ranks answer late, what they have issued too."""
    apart = seen(3, collectives=(BARRIER,))
    all_of_them = [*WAITING, apart]
    late = [replace(one, collectives=None) if one.rank in unheard else one for one in all_of_them]
    assert ranks(*late) == (None if unheard else (3,))
    assert ranks(*late, before={one.rank: one for one in all_of_them}) == (3,), "heard before"
    moved = {rank: seen(rank, ticks=39) for rank in unheard}
    assert ranks(*late, before=moved) == (None if unheard else (3,))
    assert ranks(*late, quiet=LONG) == ((2, 3) if len(unheard) == 2 else (3,))


def in_group(rank: int, group: str, members: range, seq: int = 1) -> Seen:
    one = replace(REDUCE, group=group, seq=seq, members=members)
    return seen(rank, collectives=(one,))


def test_ranks_that_wait_for_one_another_in_different_groups_are_named_with_these() -> None:
    """0 and 3 have two groups, in which they come one after the other."""
    both, done = range(0, 6, 3), replace(REDUCE, done=True)
    crossed = (in_group(0, "a", both), in_group(3, "b", both))
    one = found(*crossed)
    assert one is not None
    assert (one.ranks, one.soft, one.machine) == ((0, 3), False, False)
    assert "rank 0 is in group a, to which rank 3 has not come" in one.reason
    assert "rank 3 is in group b, to which rank 0 has not come" in one.reason
    assert ranks(*crossed, seen(1), seen(2)) == (0, 3), "others wait for them"
    assert found(*crossed, phases={0: "eval"}) is None
    assert found(*crossed, phases={0: "eval"}, quiet=LONG) is not None

    over = (replace(done, group="b", seq=1, members=both), *(crossed[0].collectives or ()))
    assert found(replace(crossed[0], collectives=over), crossed[1]) is None, "it is on its way back"
    two = tuple(replace(REDUCE, group=name, seq=1, members=both) for name in "ab")
    assert found(replace(crossed[0], collectives=two), crossed[1]) is None, "it may wait in either"
    unknown = (in_group(0, "a", range(0)), in_group(3, "b", range(0)))
    assert found(*unknown) is None
    ahead = (in_group(0, "a", both, seq=1), in_group(3, "a", both, seq=2))
    assert found(*ahead, seen(1), seen(2)) is None, "one group: the root of a broadcast goes on"


@pytest.mark.parametrize("activity", [Activity.LOCK, Activity.SLEEP])
def test_who_waits_for_a_thread_of_its_own_that_is_in_a_collective_is_not_blamed_beside_the_culprit(
    activity: Activity,
) -> None:
    """`asyncio.to_thread(dist.barrier)`, or a poll of `work.is_completed()`."""
    threaded = seen(2, activity, asleep=True, collectives=(BARRIER,))
    culprit = seen(3, Activity.LOCK, asleep=True, collectives=(replace(REDUCE, done=True),))
    assert ranks(seen(0), threaded, culprit, quiet=LONG) == (3,)
    assert ranks(seen(0), threaded, quiet=LONG) == (2,)


def test_who_sleeps_with_a_collective_under_way_may_still_be_at_work() -> None:
    """It waits for its own threads, which load what comes next, or upload what was saved."""
    ahead = replace(REDUCE, p2p=True, op="gloo:recv 0<-1")
    prefetching = seen(0, Activity.LOCK, asleep=True, collectives=(ahead,), transfers={1: (0, 2)})
    waiting = seen(
        1, Activity.P2P, collectives=(ahead,), transfers={0: (1, 2)}, name="recv", asleep=True
    )
    assert found(prefetching, waiting, quiet=LONG - 1) is None
    uploading = seen(3, Activity.LOCK, asleep=True, collectives=(replace(REDUCE, seq=40),))
    later = replace(uploading, io=8 << 20)
    assert found(*WAITING, later, before={3: uploading}, quiet=FOREVER - 1) is None


@pytest.mark.parametrize(
    "frame",
    [
        ("_cmdloop", "/usr/lib/python3.12/pdb.py"),
        ("interact", "/usr/lib/python3.12/code.py"),
        ("do_wait_suspend", "/site-packages/debugpy/_vendored/pydevd/pydevd.py"),
    ],
)
def test_who_is_at_a_debugger_s_prompt_never_hangs(frame: tuple[str, str]) -> None:
    """Whatever is called there."""
    stack = (("wait", "/usr/lib/python3.12/threading.py", 1), (*frame, 1), ("main", "train.py", 9))
    at = doing(stack, state="S")
    assert at.activity is Activity.DEBUGGER
    for waiting in (WAITING, ()):
        alone = replace(seen(3, Activity.DEBUGGER), doing=at, stack=stack)
        assert found(*waiting, alone, quiet=100 * FOREVER) is None
    queued = replace(alone, collectives=(replace(REDUCE, device=True),))
    assert found(*WAITING, queued, quiet=100 * FOREVER) is None, "its device has something to do"
    below = (*STACK, ("run", "/usr/lib/python3.12/bdb.py", 1), ("_runscript", "/x/pdb.py", 1))
    assert doing(below, state="S").activity is Activity.COLLECTIVE, "python -m pdb"


def test_all_wait_in_the_same_collective_for_too_long() -> None:
    one = found(*WAITING, seen(3), quiet=LONG)
    assert one is not None
    assert (one.ranks, one.reason) == (
        (),
        "no rank goes on: 4 of 4 ranks: all_reduce (all_reduce #41 of [[4]]), in train.py:9 in main",
    )
    assert found(*WAITING, seen(3), quiet=LONG - 1) is None


@pytest.mark.parametrize(
    ("culprit", "machine"),
    [
        (seen(3, Activity.PYTHON), False),
        (seen(3, Activity.STOPPED, state="T"), False),
        (seen(3, collectives=(BARRIER,)), False),
        (seen(3, Activity.FILE, state="D"), True),
        (seen(3), True),  # all in one collective: what is between them
        (seen(3, collectives=(replace(REDUCE, device=True, started=False),)), True),
    ],
)
def test_a_machine_s_fault_is_told_from_a_script_s(culprit: Seen, machine: bool) -> None:
    waiting: tuple[Seen, ...] = WAITING
    if culprit.collectives and culprit.collectives[0].device:
        begun = replace(REDUCE, device=True, started=True)
        waiting = tuple(replace(one, collectives=(begun,)) for one in WAITING)
    one = found(*waiting, culprit, quiet=LONG)
    assert one is not None
    assert one.machine == machine


def test_where_nobody_waits_a_rank_may_do_something_else_for_long() -> None:
    """All of them add up a metric, or there is one alone."""
    for world in (1, 4):
        all_of_them = [seen(rank, Activity.PYTHON) for rank in range(world)]
        assert ranks(*all_of_them, quiet=LONG - 1) is None
        assert ranks(*all_of_them, quiet=LONG) == tuple(range(world))
    assert ranks(seen(0, Activity.STOPPED, state="T"), quiet=0.1) == (0,)


def test_what_people_read_of_it() -> None:
    seen_by_rank = looks(
        *WAITING, seen(3, Activity.PYTHON, stack=(("endless", "train.py", 3), STACK[1]))
    )
    one = find(seen_by_rank, 5.0, Patience(allowed=1.2, stepped=True, phases={}, judged={}))
    assert one is not None
    told = account(one, seen_by_rank)
    assert told.startswith(one.reason)
    assert "endless (train.py:3)  [3]" in told
    assert "[0-2]" in told
    assert "apart: 3, in endless\n" in told
    assert "rank 0 on a, S: all_reduce (all_reduce #41 of [[4]]), in train.py:9 in main\n" in told


def test_people_read_where_the_kernel_holds_a_rank() -> None:
    lines = ("folio_wait_bit_common+0x110/0x310", "filemap_read+0xda/0x3d0")
    told = RankLook(rank=3, pid=7, at=0.0, state="D", kernel_stack=lines)
    (held,) = messages.looks(NodeId("b"), [codec.dumps(told)], 5.0)
    by_rank = looks(*WAITING, held)
    one = find(by_rank, LONG, Patience(allowed=1.2, stepped=True, phases={}, judged={}))
    assert one is not None
    assert "; in the kernel: folio_wait_bit_common < filemap_read\n" in account(one, by_rank)


# --- when to look --------------------------------------------------------------------------------


def learned(*intervals: float) -> State:
    state = hangs.begin(State(), 3, 100.0, 4)
    for interval in intervals:
        state = hangs.learned(state, interval)
    return state


def test_the_patience_is_the_rounds_own() -> None:
    assert patience(learned(), POLICY) == hangs.FIRST_STEP
    assert patience(learned(0.5), POLICY) == 5.0, "little is known of it"
    assert patience(learned(*[0.02] * 30), POLICY) == POLICY.hang_floor
    assert patience(learned(*[1.0] * 30), POLICY) == 3.0
    jitter = learned(*[1.0] * 30, 10.0, *[1.0] * 30)
    assert patience(jitter, POLICY) == pytest.approx(13.0, rel=0.05), "beyond the longest so far"


def decide(
    state: State,
    now: float,
    *looked: Mapping[int, tuple[Seen, ...]],
    ticked: float | None = 200.0,
    answered: bool = True,
    begun: bool = True,
) -> Decision:
    """looked: at the ranks, so far."""
    facts = Facts(
        ticked=ticked,
        stepping=False,
        phases={},
        seen=looked[0] if looked else {},
        answered=answered,
        begun=begun,
    )
    return hangs.decide(state, facts, now, POLICY)


def doubted(looked: float) -> State:
    """A round that hangs since 200, of whose looks the last was ordered then."""
    state = decide(learned(*[0.02] * 30), 200.61).state
    assert state.suspicion is not None
    return replace(state, suspicion=replace(state.suspicion, looked=looked))


def phases(state: State, *told: tuple[float, str, int]) -> State:
    """What a rank told: when, its phase, its ticks."""
    before = None
    for now, name, ticks in told:
        state, before = hangs.in_phase(state, before, name, ticks, now)
    return state


def test_what_a_named_phase_takes_is_known_in_later_rounds() -> None:
    state = phases(
        State(), (5, "", 7), (6, "evaluate", 7), (96, "evaluate", 7), (97, "", 8), (99, "", 9)
    )
    state = phases(state, (0, "evaluate", 9), (30, "", 9))
    assert hangs.begin(state, 2, 5.0, 4).phase_seconds == {"evaluate": 91.0}
    for number in range(1000):
        state = phases(state, (0, f"evaluate step {number}", 9), (1, "", 9))
    assert len(state.phase_seconds) == hangs.PHASES
    state = phases(state, (0, "evaluate", 9), (100 * HOUR, "save", 9))
    assert state.phase_seconds["evaluate"] == hangs.LONGEST_PHASE


def test_what_a_script_calls_its_training_is_no_long_phase() -> None:
    told = [(float(second), "train", second) for second in range(10_000)]
    assert phases(State(), *told, (10_000.0, "evaluate", 9_999)).phase_seconds == {"train": 1.0}


def test_nothing_is_looked_at_while_ranks_step() -> None:
    state = learned(*[0.02] * 30)
    told = decide(state, 200.1)
    assert told.order is None
    assert told.wake == 200.0 + suspects_at(state, POLICY)


def test_a_round_without_a_step_is_looked_at_within_a_minute() -> None:
    assert decide(learned(), 100.0 + 29.0, ticked=None).order is None
    assert decide(learned(), 100.0 + 31.0, ticked=None).order == Examine(1)


def test_one_floor_says_how_patient_it_is_without_steps() -> None:
    for floor, seconds in ((0.1, 5.0), (1.2, 60.0), (10.0, 60.0), (300.0, 300.0)):
        assert patience(learned(), Policy(hang_floor=floor)) == seconds


def test_from_the_first_doubt_to_a_verdict() -> None:
    told = decide(learned(*[0.02] * 30), 200.61)
    assert told.order == Examine(1)
    stopped = seen(3, Activity.STOPPED, state="T")
    once = {one.rank: (one,) for one in (*WAITING, stopped)}
    assert decide(told.state, 200.7, answered=False).order is None, "somebody has not answered"
    told = decide(told.state, 200.7, once)
    assert told.order is None
    assert told.wake is not None
    told = decide(told.state, told.wake + 0.001, once)
    assert told.order == Examine(2), "one look is none"
    told = decide(told.state, 201.0, looks(*WAITING, stopped))
    assert isinstance(told.order, Verdict)
    assert told.order.found.ranks == (3,)


def test_a_verdict_that_took_a_minute_waits_for_one_look_with_what_libraries_do() -> None:
    culprit = seen(3, Activity.LOCK, asleep=True)
    told = decide(doubted(200.0 + LONG), 200.1 + LONG, looks(*WAITING, culprit))
    assert told.order == Examine(2, (3,))
    calls = (("0x7f13", "libc.so.6", 0), ("PyThread_acquire_lock_timed", "python3.11", 0), *STACK)
    closely = looks(*WAITING, replace(culprit, stack=calls), before={3: culprit})
    assert decide(told.state, 200.3 + LONG, closely, ticked=200.2 + LONG).order is None, "it steps"
    told = decide(told.state, 200.5 + LONG, closely)
    assert isinstance(told.order, Verdict)
    assert told.order.found.ranks == (3,)
    assert told.order.found.reason.endswith("; in C: PyThread_acquire_lock_timed")


def test_whom_that_look_shows_going_on_is_not_named() -> None:
    culprit = seen(3, Activity.DATA, asleep=True)
    told = decide(doubted(200.0 + LONG), 200.1 + LONG, looks(*WAITING, culprit))
    assert told.order == Examine(2, (3,))
    comes_back = replace(culprit, stack=(("forward", "train.py", 7),), at=200.3 + LONG)
    closely = {**looks(*WAITING), 3: (culprit, comes_back)}
    told = decide(told.state, 200.5 + LONG, closely)
    assert not isinstance(told.order, Verdict)
    assert told.state.suspicion is not None
    assert told.state.suspicion.found is None


def test_a_rank_that_has_ended_while_all_others_wait_is_named() -> None:
    """As where it had less data than they."""
    ended = {3: NodeId("b")}
    patience = Patience(allowed=1.2, stepped=True, phases={}, judged={})
    assert find(looks(*WAITING), LONG - 1, patience, ended) is None
    one = find(looks(*WAITING), LONG + 1, patience, ended)
    assert one is not None
    assert (one.ranks, one.nodes, one.machine) == ((3,), ("b",), False)
    assert one.reason.startswith("rank 3 on b has ended, with 0; 3 of 3 others: all_reduce")
    works = (*WAITING[:2], seen(2, Activity.BACKWARD))
    busy = find(looks(*works), LONG + 1, patience, ended)
    assert busy is not None
    assert busy.ranks == (2,)


def test_who_has_ended_is_named_without_another_look() -> None:
    facts = Facts(
        ticked=200.0, stepping=False, phases={}, seen=looks(*WAITING), answered=True, begun=True,
        ended={3: NodeId("b")},
    )  # fmt: skip
    told = hangs.decide(doubted(200.9 + LONG), facts, 201.0 + LONG, POLICY)
    assert isinstance(told.order, Verdict)
    assert told.order.found.ranks == (3,)


def test_who_has_ended_is_whom_a_look_does_not_tell_of() -> None:
    seats = [Seat(node_id=NodeId(name), ranks=2) for name in "abc"]
    assert hangs.ended(seats, {0, 1, 2}, {NodeId("c")}) == {3: "b", 4: "c", 5: "c"}
    assert hangs.ended(seats, {0, 1, 4, 5}, ()) == {}, "b could not look"


def test_a_verdict_of_seconds_waits_for_a_look_behind_the_patience_and_no_longer() -> None:
    """What was seen before says nothing of what came since, as where this process stood still."""
    seen_so = looks(*WAITING, seen(3, Activity.PYTHON))
    state = doubted(201.05)
    told = decide(state, 201.1, seen_so)
    assert told.order is None
    assert told.wake == pytest.approx(201.2)
    assert isinstance(decide(state, 201.201, seen_so).order, Verdict)
    told = decide(state, 205.0, seen_so)
    assert told.order == Examine(2)
    assert isinstance(decide(told.state, 205.1, seen_so).order, Verdict)


def test_one_hang_counts_once_where_it_was() -> None:
    """However often it is judged, where that ends nothing."""
    state, seen_so, times = doubted(202.0), looks(*WAITING, seen(3, Activity.PYTHON)), 0
    told = decide(state, 202.1, seen_so)
    for now in (240.0, 250.0, 259.0):
        times += isinstance(told.order, Verdict)
        told = decide(told.state, now, seen_so)
        told = decide(told.state, now + 0.1, seen_so) if told.order is not None else told
    assert times >= 1
    assert dict(told.state.judged) == {"train.py in main": pytest.approx(2.1)}
    calm = decide(told.state, 260.0, ticked=260.0)
    again = decide(calm.state, 260.61, ticked=260.0)
    assert again.state.suspicion is not None
    state = replace(again.state, suspicion=replace(again.state.suspicion, looked=270.0))
    told = decide(state, 270.1, seen_so, ticked=260.0)
    assert isinstance(told.order, Verdict)
    assert dict(told.state.judged) == {"train.py in main": pytest.approx(10.1)}


def test_a_step_ends_the_doubt() -> None:
    told = decide(learned(*[0.02] * 30), 200.61)
    calm = decide(
        told.state, 200.8, looks(*WAITING, seen(3, Activity.STOPPED, state="T")), ticked=200.7
    )
    assert (calm.order, calm.state.suspicion) == (None, None)
    assert decide(calm.state, 201.4, ticked=200.7).order == Examine(2)


def test_a_node_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    told = decide(learned(*[0.02] * 30), 200.61)
    for world, late in ((4, 200.62 + hangs.ANSWER), (80_000, 216.62 + hangs.ANSWER)):
        state = replace(told.state, world=world)
        assert decide(state, late - 0.1, answered=False).order is None
        assert decide(state, late, answered=False).order == Examine(2)


def test_an_earlier_answer_tells_something_while_a_newer_one_is_awaited() -> None:
    """But for one from before the ranks went on."""
    suspicion = hangs.Suspicion(number=5, looked=9.0, first=4)
    told = [n for n in range(8) if hangs.tells(suspicion, n, awaited=True)]
    assert (told, hangs.tells(suspicion, 4, awaited=False)) == ([4, 5], False)
    assert hangs.tells(suspicion, 5, awaited=False)


def test_looks_become_rare() -> None:
    """Where nobody stands apart they go on, but cost nothing."""
    told, now, looked = decide(learned(*[0.02] * 30), 200.61), 200.61, 0
    while now < 800.0:
        if isinstance(told.order, Examine):
            looked += 1
        else:
            assert told.order is None
            assert told.wake is not None
            now = told.wake + 0.001
        moving = tuple(seen(0, Activity.PYTHON, ticks=n) for n in range(looked))
        told = decide(told.state, now, {0: moving[-4:]})
    assert looked < 60


# --- rounds that never step ----------------------------------------------------------------------

Look = tuple[Seen, ...]
"""At all ranks."""


def without_steps(
    *scenes: tuple[float, Look], until: float, begun: bool = True
) -> tuple[list[float], Verdict | None]:
    """When a round that began at 100 is looked at, and the first verdict; scenes: what can be seen from when on."""
    state, now, seen = learned(), 100.0, dict[int, tuple[Seen, ...]]()
    looked: list[float] = []
    while now < until:
        told = decide(state, now, seen, ticked=None, begun=begun)
        state = told.state
        if isinstance(told.order, Verdict):
            return looked, told.order
        if isinstance(told.order, Examine):
            now += 0.2
            looked.append(now)
            (_, scene), *_ = (pair for pair in reversed(scenes) if pair[0] <= now)
            for one in scene:
                told_of = replace(one, at=now, cpu=one.cpu * now)
                seen[one.rank] = (*seen.get(one.rank, ()), told_of)[-4:]
        else:
            assert told.wake is not None
            now = max(now + 0.001, told.wake)
    return looked, None


MINUTE, HOUR = 60.0, 3600.0
LONG_WITHOUT_STEPS = UNSTEPPED_PATIENCES * MINUTE
COMPUTES = tuple(seen(rank, Activity.NATIVE, cpu=1.0, ticks=0) for rank in range(4))


def test_who_only_computes_is_looked_at_ever_more_rarely_and_never_named() -> None:
    looked, verdict = without_steps((0.0, COMPUTES), until=10 * HOUR)
    assert verdict is None
    gaps = [after - before for before, after in pairwise(looked)]
    assert min(gaps) >= MINUTE
    assert max(gaps) <= hangs.LONGEST_REST + 1.0
    assert len(looked) < 160


@pytest.mark.parametrize(
    "activity", [Activity.PYTHON, Activity.SLEEP, Activity.LOCK, Activity.DATA]
)
def test_without_steps_a_rank_may_do_what_it_likes(activity: Activity) -> None:
    """The others wait for it in a barrier for hours; it tokenizes, downloads, waits for a server."""
    busy = seen(
        3, activity, asleep=activity is not Activity.PYTHON, name="_try_get_data", workers="SS"
    )
    looked, verdict = without_steps((0.0, (*WAITING, busy)), until=10 * HOUR)
    assert verdict is None
    assert len(looked) < 200


def test_without_steps_who_is_stopped_is_named() -> None:
    stopped = seen(3, Activity.STOPPED, state="T", cpu=1.0)
    looked, verdict = without_steps(
        (0.0, COMPUTES), (1000.0, (*COMPUTES[:3], stopped)), until=2000.0
    )
    assert verdict is not None
    assert verdict.found.ranks == (3,)
    assert looked[-1] < 1000.0 + 3 * MINUTE + 30.0


def test_without_steps_a_verdict_tells_how_long_its_rank_stood_still_and_nobody_elses() -> None:
    idle = seen(0, Activity.LOCK, asleep=True, ticks=0)
    stopped = seen(3, Activity.STOPPED, state="T", cpu=1.0)
    _, verdict = without_steps(
        (0.0, (idle, *COMPUTES[1:])), (HOUR, (idle, *COMPUTES[1:3], stopped)), until=2 * HOUR
    )
    assert verdict is not None
    assert verdict.found.ranks == (3,)
    assert float(verdict.stood.split()[-2]) < 3 * hangs.LONGEST_REST


def test_without_steps_collectives_that_go_on_are_progress() -> None:
    """At each look all wait, one of them in another collective, but never in the same ones."""
    scenes = []
    for number in range(2000):
        late = seen(3, collectives=(replace(REDUCE, seq=number),))
        others = (seen(rank, collectives=(replace(REDUCE, seq=number + 1),)) for rank in range(3))
        scenes.append((5.0 * number, (*others, late)))
    assert without_steps(*scenes, until=2 * HOUR)[1] is None


def test_without_steps_who_waits_apart_is_named_once_none_moved_for_the_patience() -> None:
    apart = (*WAITING, seen(3, collectives=(BARRIER,)))
    looked, verdict = without_steps((0.0, COMPUTES), (1000.0, apart), until=2000.0)
    assert verdict is not None
    assert verdict.found.ranks == (3,)
    assert 1000.0 + MINUTE < looked[-1] < 1000.0 + 4 * MINUTE
    assert verdict.stood.startswith("no move seen for ")


def test_without_steps_who_may_wait_for_a_node_without_ranks_yet_is_no_culprit() -> None:
    """It imports torch for them, say. Whoever is stopped is named all the same."""
    scene = (0.0, (*WAITING, seen(3)))
    assert without_steps(scene, until=HOUR)[1] is not None
    assert without_steps(scene, until=10 * HOUR, begun=False)[1] is None
    stopped = (0.0, (*WAITING, seen(3, Activity.STOPPED, state="T", cpu=1.0)))
    assert without_steps(stopped, until=HOUR, begun=False)[1] is not None


@pytest.mark.parametrize(
    "stuck",
    [
        seen(3, Activity.FILE, state="D"),
        seen(3, Activity.DATA, name="_try_get_data", workers="SZ"),
        seen(3, Activity.DATA, name="_try_get_data", workers="ST"),
    ],
)
def test_without_steps_what_no_script_does_by_itself_is_named_after_long(stuck: Seen) -> None:
    looked, verdict = without_steps((0.0, COMPUTES), (1000.0, (*WAITING, stuck)), until=2 * HOUR)
    assert verdict is not None
    assert verdict.found.ranks == (3,)
    assert verdict.found.soft
    assert 1000.0 + LONG_WITHOUT_STEPS < looked[-1] < 1000.0 + 1.5 * LONG_WITHOUT_STEPS


def test_without_steps_who_goes_on_at_the_last_look_is_not_named() -> None:
    """The one that is taken for the calls of libraries."""
    held = (0.0, COMPUTES), (1000.0, (*WAITING, seen(3, Activity.FILE, state="D")))
    looked, verdict = without_steps(*held, until=2 * HOUR)
    assert verdict is not None
    again, verdict = without_steps(*held, (looked[-1] - 0.1, COMPUTES), until=2 * HOUR)
    assert verdict is None
    assert again[: len(looked)] == looked


def test_without_steps_a_disk_that_gives_something_is_no_hang() -> None:
    reads = seen(3, Activity.FILE, state="D", cpu=0.1)
    assert without_steps((0.0, (*WAITING, reads)), until=10 * HOUR)[1] is None


def test_without_steps_all_that_wait_in_the_same_collective_do_so_for_long() -> None:
    looked, verdict = without_steps((0.0, (*WAITING, seen(3))), until=2 * HOUR)
    assert verdict is not None
    assert verdict.found.ranks == ()
    assert looked[-1] > 100.0 + LONG_WITHOUT_STEPS


def test_a_verdict_that_changes_nothing_is_followed_by_looks() -> None:
    """As with `--hang-action dump`: whatever else happens is seen."""
    stopped = (*COMPUTES[:3], seen(3, Activity.STOPPED, state="T"))
    seen_twice = {one.rank: (replace(one, at=1.0), replace(one, at=101.0)) for one in stopped}
    told = decide(decide(learned(), 131.0, ticked=None).state, 131.3, seen_twice, ticked=None)
    assert told.order == Examine(2, (3,)), "closely, since there is time for it"
    told = decide(told.state, 131.5, seen_twice, ticked=None)
    assert isinstance(told.order, Verdict)
    assert told.wake is not None
    again = decide(told.state, told.wake, seen_twice, ticked=None)
    while again.order is None:
        assert again.wake is not None
        again = decide(again.state, again.wake, seen_twice, ticked=None)
    assert isinstance(again.order, Examine)


def test_the_first_step_ends_the_last_resort() -> None:
    told = decide(learned(), 131.0, ticked=None)
    calm = decide(told.state, 131.5, ticked=131.4)
    assert (calm.order, calm.state.suspicion) == (None, None)

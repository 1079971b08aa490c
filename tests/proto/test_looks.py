from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.proto import codec, looks
from elastic.proto.errors import CodecError
from elastic.proto.looks import Child, Frame, Look, Thread


def frames(*names: str, file: str = "/job/train.py") -> tuple[Frame, ...]:
    return tuple(Frame(function=name, file=file, line=3) for name in names)


def look(*threads: Thread) -> Look:
    return Look(rank=0, pid=1, at=0.5, state="S", threads=threads, how="py-spy")


def test_a_look_is_told_as_it_was() -> None:
    child = Child(pid=9, state="T", command="pt_data_worker", frames=frames("f"))
    thread = Thread(
        tid=1, name="MainThread", active=False, gil=True, state="S", frames=frames("g", "h")
    )
    found = replace(look(thread), wchan="futex", kernel_stack=("a+0x1/0x2",), children=(child,))
    assert codec.loads(Look, codec.dumps(found)) == found


def test_equal_stacks_are_one_object() -> None:
    """Thousands of ranks wait in the same place."""
    stacks = [
        codec.loads(Look, codec.dumps(look(Thread(tid=tid, frames=frames("g", name)))))
        .threads[0]
        .frames
        for tid, name in ((1, "h"), (2, "h"), (3, "i"))
    ]
    assert stacks[0] is stacks[1]
    assert stacks[2] == frames("g", "i")


@pytest.mark.parametrize(
    "stack", ['""', "{}", "7", '[["f"]]', "[{}]", '[{"":"Frame","function":["f"],"file":""}]']
)
def test_what_is_no_stack_is_refused(stack: str) -> None:
    text = codec.dumps(look(Thread(tid=1, frames=())))
    assert text.count('"frames":[]') == 1
    with pytest.raises(CodecError):
        codec.loads(Look, text.replace('"frames":[]', f'"frames":{stack}'))


def test_what_a_later_release_tells_of_a_frame_is_passed_over() -> None:
    text = codec.dumps(look(Thread(tid=1, frames=frames("g"))))
    later = text.replace('"line":3', '"line":3,"names":["a"]')
    assert later != text
    assert codec.loads(Look, later) == codec.loads(Look, text)


@given(st.integers(0, 12_000), st.integers(3, 300))
def test_a_deep_stack_keeps_both_ends(depth: int, most: int) -> None:
    stack = [Frame(function=str(n), file="", line=1) for n in range(depth)]
    cut = looks.cut(stack, most)
    assert len(cut) == min(depth, most)
    if depth > most:
        assert (cut[0], cut[-1]) == (stack[0], stack[-1])
        assert sum(frame.function.endswith(" more>") for frame in cut) == 1


def test_no_look_is_larger_than_half_a_megabyte() -> None:
    huge = looks.frame("f" * 1_000_000, "/" + "d" * 1_000_000 + "/end.py", 1 << 70)
    assert huge.file.endswith("/end.py")
    assert huge.line == 0
    threads = [
        Thread(tid=n, name=looks.text("n" * 5_000), frames=looks.cut([huge] * 10_000))
        for n in range(1_000)
    ]
    fitted = looks.fit(threads, 700)
    assert fitted[0].tid == 700
    assert len(fitted[0].frames) == looks.FRAMES
    assert len(codec.dumps(look(*fitted)).encode()) < 1 << 19


def test_a_backward_on_another_thread_tells() -> None:
    main = Thread(tid=1, frames=frames("_engine_run_backward", "backward", "<module>"))
    device = Thread(tid=2, frames=frames("wait", "post_backward"))
    pool = Thread(tid=3, frames=frames("wait", "get", "run", "_bootstrap_inner", "_bootstrap"))
    told = [frame.function for frame in looks.telling(look(main, device, pool))]
    assert told == ["wait", "post_backward", "_engine_run_backward", "backward", "<module>"]


def test_a_script_that_trains_on_another_thread_is_told_by_that() -> None:
    main = Thread(tid=1, frames=frames("join", file="/usr/lib/threading.py"))
    trains = Thread(
        tid=2, frames=frames("all_reduce", "step", "run", "_bootstrap_inner", "_bootstrap")
    )
    idle = Thread(tid=3, frames=(*frames("get", file="/usr/lib/queue.py"), *frames("_bootstrap")))
    assert looks.telling(look(main, trains, idle)) == trains.frames
    assert looks.telling(look(main, idle)) == main.frames


def test_without_stacks_nothing_tells() -> None:
    assert looks.telling(look()) == ()
    assert looks.telling(look(Thread(tid=1, frames=()))) == ()

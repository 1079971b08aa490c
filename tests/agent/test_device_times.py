"""What steps take on a device: numbers first; then beside a stand-in for CUDA; then, with `pytest -m gpu`, events of
real devices."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.device_times import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    KEEPS_PACE,
    MOST,
    OPTIMIZER,
    by_phase,
    is_starved,
)
from tests.agent.cuda import ROOT, beside


def test_a_step_of_ddp() -> None:
    kinds = [FORWARD, BACKWARD, COLLECTIVE, FORWARD, OPTIMIZER, FORWARD]
    assert by_phase(kinds, [0, 10, 30, 35, 36, 40]) == [11, 20, 4, 5]


@given(st.lists(st.tuples(st.sampled_from(range(4)), st.integers(0, 10**12)), min_size=1))
def test_phases_are_the_whole(marks: list[tuple[int, int]]) -> None:
    kinds, at = [kind for kind, _ in marks], sorted(when for _, when in marks)
    found = by_phase(kinds, at)
    assert sum(found) == at[-1] - at[0]
    assert all(took == 0 for phase, took in enumerate(found) if phase not in kinds[:-1])


@pytest.mark.parametrize(
    ("host", "device", "drained", "starved"),
    [
        (20, 20, True, True),  # kernels run as they come
        (20, 20, False, False),  # the queue is full
        (5, 20, False, False),  # the host is ahead
        (5, 20, True, False),  # and waits before the step ends: for a norm, a scaler
        (5, 0, True, False),  # no backward pass
    ],
)
def test_who_waits_for_whom(host: int, device: int, drained: bool, starved: bool) -> None:
    assert is_starved(host, device, drained=drained) == starved


@given(st.integers(1, 10**10), st.floats(1.0, 10.0))
def test_a_slower_host_is_no_less_starving(device: int, more: float) -> None:
    host = round(KEEPS_PACE * device) + 1
    assert is_starved(round(host * more), device, drained=True)


# --- beside a stand-in for CUDA --------------------------------------------------------------------


def test_each_phase_is_told_of_its_step(tmp_path: Path) -> None:
    """Also of one whose backward pass fails in the script, and of one whose optimizer a scaler lets take no step."""
    code = """
times = follow()
step()
step(1000, 2000, (7000, 1000), 4000)
step(1000, -1, (), 4000)
step(1000, 2000, (), 4000, steps=False)
step(1000, 2000, (), 4000)
step()
found = [told(), times._off]
"""
    steps, off = beside(tmp_path, code)
    assert steps == [
        [2, 1000, 2000, 4000, 8000],
        [3, 1000, -1, 4000, 0],
        [4, 2000, 4000, 4000, 0],
        [5, 1, 2, 4, 0],
    ]
    assert not off


def test_a_capture_is_not_touched_that_the_first_step_is_in(tmp_path: Path) -> None:
    code = """
graph = CUDAGraph()
graph.capture_begin()
times = follow()
step()
step()
recorded = device.recorded
graph.capture_end()
for _ in range(3):
    step(1000)
found = [recorded, len(told()), times._off]
"""
    assert beside(tmp_path, code) == [0, 2, False]


def test_a_fork_does_not_touch_the_device(tmp_path: Path) -> None:
    """Its optimizer, a copy, may be the one whose steps count."""
    code = """
times = follow()
step()
child = os.fork()
if child == 0:
    step(1, 2, (3,))
    os._exit(10 + times._off)
_, status = os.waitpid(child, 0)
found = os.waitstatus_to_exitcode(status)
"""
    assert beside(tmp_path, code) == 10


def test_a_tensor_that_takes_no_hooks_is_the_script_s_business(tmp_path: Path) -> None:
    """Nothing is measured any more, and the script does not hear of it."""
    code = """
class Hookless(torch.Tensor):
    def register_hook(self, hook):
        raise NotImplementedError

times = follow()
step()
weight = torch.ones(1, requires_grad=True)
(weight * torch.ones(1).as_subclass(Hookless)).sum().backward()
recorded = device.recorded
step()
step()
found = [weight.grad.tolist(), times._off, device.recorded - recorded, told()]
"""
    assert beside(tmp_path, code) == [[1.0], True, 0, []]


def test_who_asks_again_hears_whether_what_there_was_is_done(tmp_path: Path) -> None:
    code = """
import threading
said = []
def ask(given, done):
    device.given, device.done = given, done
    thread = threading.Thread(target=lambda: said.append(device_times.on_device().value))
    thread.start()
    thread.join()
follow()
ask(0, 0)
step()
ask(3, 3)
ask(5, 3)
ask(6, 4)  # of five
ask(6, 5)
ask(8, 5)
ask(8, 8)
ask(9, 8)
graph = CUDAGraph()
graph.capture_begin()
ask(9, 8)
graph.capture_end()
ask(9, 8)
found = said
"""
    wanted = ["", "idle", "busy", "held", "busy", "held", "idle", "busy", "", "held"]
    assert beside(tmp_path, code) == wanted


def test_who_asks_is_not_held_up_by_a_queue_that_is_full(tmp_path: Path) -> None:
    """Nor is anybody else of its process, whom it might be to tell of."""
    code = """
def ask():
    return device_times.on_device().value
follow()
step()
device.given, device.done = 9, 3
device.room.clear()
found = [ask(), ask(), ask()]
device.room.set()
assert device_times._ours._asker._answered.wait(60)
found += [ask(), ask()]
device.done = 9
found.append(ask())
"""
    assert beside(tmp_path, code) == ["busy", "held", "held", "busy", "held", "idle"]


def test_a_step_with_too_many_marks_is_followed_by_a_pause(tmp_path: Path) -> None:
    """As long as for any of so many, though nothing of it is told."""
    code = f"""
device_times.A_MARK_NS = 1_000_000_000_000
times = follow()
step(waits=(1,) * {MOST})
step(waits=(1,) * {MOST})
recorded = device.recorded
for _ in range(3):
    step()
found = [recorded, device.recorded - recorded, told()]
"""
    assert beside(tmp_path, code) == [MOST, 0, []]


# --- on a real device ------------------------------------------------------------------------------

BEGIN = """
import json, os, sys, time
import torch, torch.distributed as dist
from elastic.agent import device_times, hook
from elastic.proto import page
fd = page.create()
seen = page.open_page(fd)
writer = page.PageWriter.claim(fd, os.getpid())
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1, device_id=torch.device("cuda", 0))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64, device="cuda"))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.ones(8, 64, device="cuda")
ticker = hook._Ticker(hook.Attachment(writer, None))
ticker._first, ticker._leader = False, id(optimizer)
sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(ticker.tick)
times = ticker._device = device_times.follow(writer, lambda: ticker._leader)
device_times.EVERY_NS = device_times.A_MARK_NS = 0
A_WHILE = 20_000_000  # cycles: some 10 ms
class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        in_backward()
        return gradient
def in_backward():
    pass
def step(forward=lambda: None, more=lambda: None):
    optimizer.zero_grad()
    forward()
    Backward.apply(model(batch)).sum().backward()
    more()
    optimizer.step()
def measured(count, **more):
    "So many of the steps that are done when all is."
    step()
    torch.cuda.synchronize()
    step()  # what was measured before is told
    before = writer.words[page.DEVICE_STEPS]
    for _ in range(count):
        step(**more)
    torch.cuda.synchronize()
    step()
    return [
        [one.number, one.forward_ns, one.backward_ns, one.optimizer_ns, one.collectives_ns, one.starved]
        for one in page.device_steps(seen, before)[0]
    ]
for _ in range(5):
    step()
found = None
"""
END = """
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # a kernel may run for ever
"""


def run(folder: Path, code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code + END, str(folder)],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def middle(steps: list[list[int]]) -> list[int]:
    """Of each number the median."""
    return [sorted(column)[len(column) // 2] for column in zip(*steps, strict=True)]


SLEEP = "lambda: torch.cuda._sleep(A_WHILE)"


@pytest.mark.gpu
def test_what_takes_long_on_the_device_is_found_in_its_phase(tmp_path: Path) -> None:
    """Sleeps of the same kernel, which the host is ahead of."""
    code = f"""
found = [measured(8, forward={SLEEP})]
in_backward = {SLEEP}
found.append(measured(8))
in_backward = lambda: None
optimizer.register_step_pre_hook(lambda *_: torch.cuda._sleep(A_WHILE))
found.append(measured(8))
"""
    in_forward, in_backward, in_optimizer = run(tmp_path, code)
    for phase, steps in enumerate((in_forward, in_backward, in_optimizer), 1):
        assert len(steps) >= 3, "some are in flight when the next could be measured"
        took = middle(steps)
        others = sum(took[1:5]) - took[phase]
        assert took[phase] > others, (phase, steps)
        assert not took[5], "the host is ahead of it"
    numbers = [step[0] for step in in_forward]
    assert numbers == sorted({*numbers})


@pytest.mark.gpu
def test_a_host_that_is_slow_in_its_backward_pass_starves_the_device(tmp_path: Path) -> None:
    code = """
def in_backward():
    end = time.monotonic() + 0.02
    while time.monotonic() < end:
        pass
found = measured(8, more=lambda: time.sleep(0.002))
"""
    took = middle(run(tmp_path, code))
    assert took[5]
    assert took[2] > took[1] + took[3] + took[4]


@pytest.mark.gpu
def test_collectives_that_a_stream_waits_for_are_apart(tmp_path: Path) -> None:
    """What DDP waits for at the end of its backward pass, and an all-reduce on the stream, behind a stream that is late."""
    code = """
side = torch.cuda.Stream()
def waits():
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_WHILE)
    torch.cuda.current_stream().wait_event(side.record_event())
large = torch.ones(64 << 20, device="cuda")
found = [measured(8, more=waits), measured(8, more=lambda: [dist.all_reduce(large) for _ in range(4)])]
"""
    late, reduced = run(tmp_path, code)
    took = middle(late)
    assert took[4] > took[1] + took[2] + took[3], late
    assert middle(reduced)[4] > 0, reduced


@pytest.mark.gpu
def test_events_are_made_once_and_marks_have_a_bound(tmp_path: Path) -> None:
    code = f"""
measured(8)
def held():
    return [len(step.events) for step in times._free + times._under_way]
def many():
    for _ in range({MOST}):
        torch.cuda.current_stream().wait_event(torch.cuda.current_stream().record_event())
before = held()
measured(50)
found = [sorted(before), sorted(held()), len(measured(4, more=many)), times._off]
"""
    before, after, overfull, off = run(tmp_path, code)
    assert max(after) == max(before), "as many as a step has marks"
    assert overfull <= 2, "only those before and after them"
    assert not off


@pytest.mark.gpu
def test_a_kernel_that_does_not_end_is_told_from_one_that_does(tmp_path: Path) -> None:
    code = """
import threading
said = []
def ask():
    thread = threading.Thread(target=lambda: said.append(device_times.on_device().value))
    thread.start()
    thread.join()
measured(2)
torch.cuda.synchronize()
ask()
torch.cuda._sleep(A_WHILE * 100)
ask()
torch.cuda.synchronize()
torch.cuda._sleep(A_WHILE * 100)
ask()
torch.cuda._sleep(1 << 62)
for _ in range(2):
    ask()
time.sleep(3)
ask()
ask()
found = said
"""
    said = run(tmp_path, code)
    assert said[:3] == ["idle", "busy", "busy"]
    assert said[-2:] == ["busy", "held"], "the last is another kernel than the one before"


@pytest.mark.gpu
def test_a_capture_is_left_alone(tmp_path: Path) -> None:
    code = """
import threading
measured(2)
said, begun, asked = [], threading.Event(), threading.Event()
def ask():
    begun.wait()
    said.append(device_times.on_device().value)
    asked.set()
threading.Thread(target=ask).start()
graph, still = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
with torch.cuda.graph(graph):
    still += 1
    ticker.tick(optimizer, (), {})
    begun.set()
    asked.wait()
graph.replay()
torch.cuda.synchronize()
found = [said, still.tolist(), len(measured(8)) > 0, times._captures, times._off]
"""
    assert run(tmp_path, code) == [[""], [2.0] * 8, True, 0, False]

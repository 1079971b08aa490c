"""Probes of a whole node: real processes, on the CPU, some of them with a fault."""

import asyncio
import contextlib
import json
import os
import select
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.agent.probes import process
from elastic.agent.probes.answers import Answer
from elastic.agent.probes.run import Device, Limits, Prober, devices
from tests.agent.probes.healthy import (
    CPU,
    PAIR,
    by_name,
    environ,
    faults,
    module,
    probe,
)
from tests.agent.probes.test_nvml import FAKE
from tests.e2e.harness.stuck import stuck_folder
from tests.elastic.asking import elasticctl

SHORT = 4.0
"""Seconds that a hanging probe of these tests is given; a healthy one takes far less."""


@pytest.mark.parametrize(
    ("command", "figures"),
    [
        (module("matmul"), {"tflops", "slowest_tflops", "checksum"}),
        (module("bandwidth"), {"gb_s"}),
        (module("memory"), {"total_bytes", "free_bytes"}),
        (module("disk", "."), {"free_bytes", "free_files", "write_gb_s", "fsync_s", "read_gb_s"}),
        (module("copies", "--device", "cpu"), set()),
    ],
)
def test_each_probe_is_a_program_with_one_answer(command: list[str], figures: set[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    said = json.loads(line)
    assert said["ok"], said
    assert figures <= said["figures"].keys()
    assert bool(said["figures"]) == bool(figures), said


def test_who_was_stopped_itself_gives_a_probe_its_time_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a node that was suspended: the deadline has passed, and nobody is to blame."""
    monkeypatch.setattr(process, "STALL", 0.0)

    async def run() -> Answer:
        program = process.Program("memory", (), {**os.environ})
        asking = asyncio.create_task(program.only_answer("memory", 0.01))
        while program._transport is None:
            await asyncio.sleep(0)
        select.select(
            [program._stdout], [], [], 60
        )  # our loop stands still until the answer is there
        return await asking

    assert asyncio.run(run()).ok


def test_a_healthy_node(tmp_path: Path) -> None:
    verdict, left = probe(dict(os.environ), folders=[tmp_path])
    assert verdict.state == "ok", verdict
    assert set(by_name(verdict)) == {
        ("memory", ""),
        ("disk", str(tmp_path)),
        ("matmul", "cpu"),
        ("bandwidth", "cpu"),
    }
    assert all(one.state == "ok" and one.figures for one in verdict.probes), verdict
    assert not left
    assert not list(tmp_path.iterdir()), "the disk's probe left something"


def test_devices_work_together() -> None:
    verdict, left = probe(dict(os.environ), devices=PAIR)
    found = by_name(verdict)
    for device in PAIR:
        parts = {part.name: part for part in verdict.parts if part.device == device.label}
        assert parts.keys() >= STEPS
        for name, part in parts.items():
            step, _, inner = name.partition(": ")
            assert part.seconds >= 0
            if inner and inner != "init":  # a meeting, which goes on beside other steps
                whole = parts[step]
                assert whole.began <= part.began
                assert part.began + part.seconds <= whole.began + whole.seconds
        assert parts["device gone"].began >= verdict.seconds
    assert verdict.state == "ok", verdict
    assert found["collectives", ""].figures.keys() == {"all_reduce_gb_s", "all_gather_gb_s"}
    checksums = {found["matmul", device.label].figures["checksum"] for device in PAIR}
    assert len(checksums) == 1, "two devices have other bits of the same product"
    assert ("matmul_together", "cpu1") in found
    assert not left


STEPS = {
    "torch", "torch: import", "torch: reckoned", "device", "device: context", "device: sum", "product",
    "product: factors", "product: first", "product: check", "matmul_together", "matmul", "bandwidth",
    "collectives", "collectives: init", "collectives: all_reduce", "collectives: all_gather", "device gone",
}  # fmt: skip
"""Of a device that is no GPU, beside another."""


GPUS = tuple(Device(label=f"gpu{at}", torch="cpu", nvml=f"{at}") for at in (0, 1))
"""With a stand-in for NVML, and the CPU in place of CUDA."""


def with_nvml(folder: Path, change: str = "", fault: str = "") -> dict[str, str]:
    site = environ(folder, fault)
    (folder / "pynvml.py").write_text(FAKE + change)
    return site


def test_nvml_is_asked_who_is_on_a_gpu_before_we_are(tmp_path: Path) -> None:
    verdict, left = probe(with_nvml(tmp_path), devices=GPUS)
    assert verdict.state == "ok", verdict
    assert not left
    nvml = by_name(verdict)["nvml", "gpu1"]
    assert (nvml.figures["others"], nvml.figures["nvlinks_active"]) == (0, 18)
    asked = [part for part in verdict.parts if part.name == "nvml_use"]
    assert [part.device for part in asked] == ["gpu0", "gpu1"]
    first = min(part.began for part in verdict.parts if part.name == "device")
    assert all(part.began + part.seconds <= first for part in asked)


NOTED = """
def note(what):
    with open({!r}, "a") as file:
        file.write(what + "\\n")
"""
ASKED = """
def nvmlDeviceGetComputeRunningProcesses(handle):
    note("asked")
    return []
"""
DRIVER = """
if in_probe("device"):
    import ctypes
    class Driver:
        def cuInit(self, flags):
            note("init")
        def cuDevicePrimaryCtxRetain(self, context, device):
            note("context")
    def load(name, *args, inner=ctypes.CDLL, **kwargs):
        return Driver() if name == "libcuda.so.1" else inner(name, *args, **kwargs)
    ctypes.CDLL = load
"""


def test_nobody_is_on_a_gpu_before_all_were_asked_for(tmp_path: Path) -> None:
    """With a stand-in for CUDA's driver, of which torch has nothing."""
    noted = NOTED.format(str(tmp_path / "noted"))
    site = with_nvml(tmp_path, noted + ASKED, noted + DRIVER)
    verdict, _ = probe(site, devices=[replace(gpu, torch="cuda:0") for gpu in GPUS])
    words = (tmp_path / "noted").read_text().split()
    assert words.count("init") == 2, verdict
    assert [word for word in words if word != "init"] == ["asked"] * 2 + ["context"] * 2


def test_where_nvml_says_nothing_its_gpu_is_tried_all_the_same(tmp_path: Path) -> None:
    silent = "def nvmlInit():\n    raise NVMLError('no driver')\n"
    verdict, left = probe(with_nvml(tmp_path, silent), devices=GPUS)
    assert verdict.state == "ok", verdict
    assert not left
    for gpu in ("gpu0", "gpu1"):
        nvml = by_name(verdict)["nvml", gpu]
        assert (nvml.state, nvml.what) == ("unknown", "NVML: no driver")
        assert by_name(verdict)["matmul", gpu].state == "ok"


REACH = """
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: {}
    return ("handle", index)
"""
COUNT = """
def nvmlDeviceGetRemappedRows(handle):
    if handle[1] == 1: {}
    return (1, 0, 0, 0)
"""


@pytest.mark.parametrize(
    ("place", "fault", "words"),
    [
        (REACH, "raise NVMLError('GPU is lost')", "NVML cannot reach it: GPU is lost"),
        (REACH, "import signal; signal.pause()", "it waits"),
        (COUNT, "import signal; signal.pause()", "it waits"),
        (COUNT, "import os; os._exit(3)", "ended with exit code 3"),
    ],
)
def test_a_driver_that_fails_is_told_of_its_gpu_alone(
    tmp_path: Path, place: str, fault: str, words: str
) -> None:
    waits = words == "it waits"
    begins = 3 * SHORT if waits and place is REACH else 100.0  # the driver; torch does, too
    limits = Limits(torch=100.0, device=begins, other=SHORT if waits else 100.0)
    sick = with_nvml(tmp_path, place.format(fault))
    verdict, left = probe(sick, devices=GPUS, limits=limits)
    assert faults(verdict).keys() == {("nvml", "gpu1")}, verdict
    assert words in faults(verdict)["nvml", "gpu1"]
    assert by_name(verdict)["nvml", "gpu0"].state == "ok"
    assert by_name(verdict)["matmul", "gpu1"].state == "ok"
    assert not left


def test_a_process_sees_its_own_gpu_only(tmp_path: Path) -> None:
    """A driver takes its time for each that it sees."""
    fault = f"""
if in_probe("device"):
    import os
    with open({str(tmp_path / "seen")!r}, "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
"""
    verdict, _ = probe(with_nvml(tmp_path, fault=fault), devices=GPUS)
    assert verdict.state == "ok", verdict
    assert sorted((tmp_path / "seen").read_text().split()) == ["0", "1"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("while True: pass", "it runs on"),
        ("import signal; signal.pause()", "it waits"),
        ("import os; os.kill(os.getpid(), 19)", "it was stopped by a signal"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; sys.stderr.write('the disk sings\\n'); os._exit(0)", "the disk sings"),
        ("print('hello', flush=True)", "'hello\\n', which is no JSON"),
        ("print('[' * 60000, flush=True)", "which is no JSON"),
        ("print('{}', flush=True)", "which is no answer"),
        ("print('x' * 200000, flush=True)", "a line of more than 65536 bytes"),
        (
            'print(\'{"probe": "memory", "ok": true, "what": "", "figures": {}}\', flush=True)',
            "it answered for memory",
        ),
        (
            "import atexit, os; out = os.dup(1); atexit.register(lambda: os.write(out, b'bye'))",
            "after its answer it printed b'bye'",
        ),
    ],
)
def test_no_good_answer_is_a_verdict(tmp_path: Path, fault: str, words: str) -> None:
    broken = environ(tmp_path / "site", f"if in_probe('disk'):\n    {fault}")
    hangs = words in ("it runs on", "it waits", "it was stopped by a signal")
    limits = Limits(torch=100.0, device=100.0, other=SHORT if hangs else 100.0)
    verdict, left = probe(broken, devices=(), folders=[tmp_path], limits=limits)
    found = faults(verdict)
    assert found.keys() == {("disk", str(tmp_path))}, verdict
    assert words in found["disk", str(tmp_path)]
    assert by_name(verdict)["memory", ""].state == "ok", "the others went on"
    assert not left


def test_a_request_that_a_disk_never_answers_is_left_behind(tmp_path: Path) -> None:
    left: set[int] = set()
    with stuck_folder(tmp_path / "stuck") as stuck:

        async def main() -> None:
            prober = Prober(
                "quick",
                devices=[CPU],
                folders=[stuck.path],
                environ=os.environ,
                limits=Limits(torch=100.0, device=100.0, other=SHORT),
            )
            looking = asyncio.create_task(prober.probe())
            victim = await asyncio.get_running_loop().run_in_executor(None, stuck.victim, 100.0)
            verdict = await looking
            (what,) = faults(verdict).values()
            assert f"process {victim}: it is stuck in the kernel" in what
            assert "it could not be killed, and is left behind" in what
            assert prober.pids == {victim}
            left.add(victim)

        asyncio.run(main())
    for pid in left:
        os.waitpid(pid, 0)


def test_of_a_thread_that_the_kernel_holds_it_is_said_where(tmp_path: Path) -> None:
    """Its main thread only waits for it."""
    with stuck_folder(tmp_path / "stuck") as stuck:
        fault = f"""
if in_probe('disk'):
    import threading
    reader = threading.Thread(target=open({str(stuck.path / "data")!r}, 'rb').read)
    reader.start()
    reader.join()
"""
        limits = Limits(torch=100.0, device=100.0, other=SHORT)
        broken = environ(tmp_path / "site", fault)
        verdict, left = probe(broken, devices=(), folders=[tmp_path], limits=limits)
    (what,) = faults(verdict).values()
    assert "it is stuck in the kernel, in " in what
    assert "futex" not in what
    assert not left


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("torch.mm = lambda *a, **k: time.sleep(1000)", "it waits"),
        ("torch.mm = lambda *a, **k: os.abort()", "was killed by SIGABRT"),
        ("torch.mm = lambda *a, **k: 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_fault_is_pinned_to_its_step(tmp_path: Path, fault: str, words: str) -> None:
    broken = environ(tmp_path / "site", torch_fault=fault)
    limits = Limits(torch=100.0, device=SHORT if words == "it waits" else 100.0, other=100.0)
    verdict, left = probe(broken, limits=limits)
    found = faults(verdict)
    assert found.keys() == {("matmul", "cpu")}, verdict
    assert words in found["matmul", "cpu"]
    assert ("bandwidth", "cpu") not in by_name(verdict), "a device with a fault was tried further"
    assert not left


@pytest.mark.parametrize(
    ("when", "words"),
    [("calls == 3", "in repetition 2 of the same product 1 elements differ: row 7, column 9"),
     ("True", "elements of a product are wrong")],
)  # fmt: skip
def test_a_corrupting_matmul_is_found(tmp_path: Path, when: str, words: str) -> None:
    """A bit of one element flips, once or each time: the second is the same in each repetition."""
    at = "7, 9" if when != "True" else "0, 0"
    fault = f"""
calls, mm = 0, torch.mm
def corrupting(*args, **kwargs):
    global calls
    calls += 1
    product = mm(*args, **kwargs)
    if {when}:
        product.view(torch.int32)[{at}] ^= 1 << 3
    return product
torch.mm = corrupting
""".replace("global calls", "nonlocal calls")
    verdict, _ = probe(environ(tmp_path / "site", torch_fault=fault))
    found = faults(verdict)
    assert found.keys() == {("matmul", "cpu")}, verdict
    assert words in found["matmul", "cpu"]


CORRUPTING = """
import torch.distributed
def corrupting(act, which):
    def spoiled(*args, **kwargs):
        done = act(*args, **kwargs)
        if args[0].dtype is torch.int32 and {when}:
            args[0].view(-1)[5] ^= 1 << 3
        return done
    return spoiled
torch.{function} = corrupting(torch.{function}, 0)
"""
SECOND = 'sys.orig_argv[sys.orig_argv.index("--rank") + 1] == "1"'


@pytest.mark.parametrize(
    ("function", "when", "devices", "where", "words"),
    [
        ("Tensor.copy_", "True", (CPU,), ("bandwidth", "cpu"),
         "of a copy within the memory 1 words are not what was written: word 5 is"),
        ("distributed.all_reduce", SECOND, PAIR, ("collectives", ""),
         "of an all-reduce 1 words are not what the sum is: word 5 is"),
        ("distributed.all_gather_into_tensor", SECOND, PAIR, ("collectives", ""),
         "of what an all-gather brought from rank 0 1 words are not what was written"),
    ],
)  # fmt: skip
def test_a_bit_that_flips_on_its_way_is_found(
    tmp_path: Path,
    function: str,
    when: str,
    devices: Sequence[Device],
    where: tuple[str, str],
    words: str,
) -> None:
    fault = CORRUPTING.format(function=function, when=when)
    verdict, _ = probe(environ(tmp_path / "site", torch_fault=fault), devices=devices)
    found = faults(verdict)
    assert found.keys() == {where}, verdict
    assert words in found[where]


def test_a_stopped_rank_of_a_collective_is_named(tmp_path: Path) -> None:
    """The other one waits for it, and is not accused."""
    fault = """
import torch.distributed
def stop(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)
if in_probe("device", "--rank", "1", "--world"):
    if sys.orig_argv[sys.orig_argv.index("--rank") + 1] == "1":
        torch.distributed.all_reduce = stop
"""
    limits = Limits(torch=100.0, device=2.5 * SHORT, other=100.0)
    verdict, left = probe(
        environ(tmp_path / "site", torch_fault=fault), devices=PAIR, limits=limits
    )
    found = faults(verdict)
    assert found.keys() == {("collectives", "cpu1")}, verdict
    assert "it was stopped by a signal" in found["collectives", "cpu1"]
    assert not left


def test_without_a_device_nobody_is_accused_of_the_collective(tmp_path: Path) -> None:
    fault = """
if sys.orig_argv[sys.orig_argv.index("--rank") + 1] == "0":
    torch.mm = lambda *args, **kwargs: os.abort()
"""
    verdict, _ = probe(environ(tmp_path / "site", torch_fault=fault), devices=PAIR)
    assert faults(verdict).keys() == {("matmul_together", "cpu0")}, verdict
    collectives = by_name(verdict)["collectives", ""]
    assert collectives.state == "unknown"
    assert "cpu0" in collectives.what


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    broken = environ(tmp_path / "site", "sys.modules['torch'] = None")
    verdict, _ = probe(broken)
    found = faults(verdict)
    assert found.keys() == {("torch", "cpu")}, verdict
    assert "import of torch halted" in found["torch", "cpu"]


def test_what_was_prepared_is_used() -> None:
    async def main() -> None:
        prober = Prober("quick", devices=[CPU], folders=[], environ=os.environ)
        await prober.prepare()
        (prepared,) = prober.pids
        looking = asyncio.create_task(prober.probe())
        while len(prober.pids) < 2:  # it has begun to look
            await asyncio.sleep(0)
        assert prepared in prober.pids
        verdict = await looking
        assert verdict.state == "ok", verdict
        assert not prober.pids

    asyncio.run(main())


def test_a_cancelled_look_leaves_nothing(tmp_path: Path) -> None:
    hanging = environ(tmp_path / "site", "if in_probe('disk'):\n    import signal; signal.pause()")

    async def main() -> None:
        prober = Prober("quick", devices=[CPU], folders=[tmp_path], environ=hanging)
        await prober.prepare()
        looking = asyncio.create_task(prober.probe())
        while len(prober.pids) < 2:
            await asyncio.sleep(0)
        started = prober.pids
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking
        assert not prober.pids
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]

    asyncio.run(main())


@pytest.mark.parametrize("when", ["before it began", "in a request that hangs"])
def test_probes_end_with_who_started_them(tmp_path: Path, when: str) -> None:
    """Whom SIGKILL ends."""
    pid = tmp_path / "pid"
    fault = f"""
if in_probe("disk"):
    import os, signal
    def tell():
        with open({str(tmp_path / "new")!r}, "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(tmp_path / "new")!r}, {str(pid)!r})
    def hang(*args):
        tell()
        signal.pause()
    os.statvfs = hang
    if {when == "before it began"}:
        parent = os.getppid()
        tell()
        while os.getppid() == parent:
            pass
"""
    hanging = environ(tmp_path / "site", fault)
    command = elasticctl("probe", "--folder", str(tmp_path))
    with subprocess.Popen(command, env=hanging, stdout=subprocess.DEVNULL) as looking:
        while not pid.exists():
            assert looking.poll() is None, "it ended without a probe of the disk"
        looking.kill()
    with contextlib.suppress(ProcessLookupError):  # it has ended
        gone = os.pidfd_open(int(pid.read_text()))
        assert select.select([gone], [], [], 100.0)[0], "the probe outlived who started it"
        os.close(gone)


def test_devices_that_may_be_used(tmp_path: Path) -> None:
    assert devices({}, tmp_path) == (CPU,)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia10"):
        (tmp_path / name).touch()
    gpu = [Device(label=f"gpu{at}", torch="cuda:0", nvml=f"{at}") for at in range(3)]
    assert devices({}, tmp_path) == tuple(gpu)
    assert devices({"CUDA_VISIBLE_DEVICES": "2, 0"}, tmp_path) == (
        Device(label="gpu2", torch="cuda:0", nvml="2"),
        Device(label="gpu0", torch="cuda:0", nvml="0"),
    )
    assert devices({"CUDA_VISIBLE_DEVICES": "GPU-5f"}, tmp_path) == (
        Device(label="GPU-5f", torch="cuda:0", nvml="GPU-5f"),
    )
    more = ",".join(map(str, range(8)))  # as in a script of a larger machine
    for some in (more, "0,1,2,GPU"):
        assert devices({"CUDA_VISIBLE_DEVICES": some}, tmp_path) == tuple(gpu)
    for nothing in ("", "-1", "7", "1,1", "NoDevFiles"):
        assert devices({"CUDA_VISIBLE_DEVICES": nothing}, tmp_path) == (CPU,)

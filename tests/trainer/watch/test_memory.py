import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic.proto.errors import UsageError
from elastic.trainer.watch import memory
from elastic.trainer.watch.memory import Memory

GIB = 2**30
USED = Memory(
    allocated=70 * GIB, reserved=75 * GIB, peak_allocated=72 * GIB, peak_reserved=76 * GIB,
    allocations=9, retries=2, ooms=1,
)  # fmt: skip


def test_running_out_is_one_line() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"
    )
    assert memory.ran_out(error)
    told = memory.explained(
        error,
        where="rank 3",
        memory=USED,
        advice=memory.advice(
            micro_batch_size=4,
            recompute=None,
            zero=1,
            data_parallel=2,
            tensor_parallel=1,
            attention_dropout=0.1,
        ),
        saved=True,
    )
    assert str(told) == (
        "CUDA out of memory (rank 3): 2.50 GiB were asked for, 70.00 GiB were in use, "
        "72.00 GiB at the most, of 75.00 GiB that were taken from the device; "
        "give --attention-dropout 0, with which attention is fused, or lower "
        "--micro-batch-size below 4, or give --recompute-activations, or give --recompute-granularity full "
        "--recompute-method uniform, or raise --zero-stage above 1, or raise "
        "--tensor-model-parallel-size above 1; the last checkpoint is kept"
    )


@pytest.mark.parametrize(
    ("replicas", "said"),
    [
        (2, ["raise --zero-stage above 0", "raise --tensor-model-parallel-size above 2"]),
        (1, ["start more ranks and raise --tensor-model-parallel-size above 2"]),
    ],
)
def test_advice_is_of_what_can_still_be_turned(replicas: int, said: list[str]) -> None:
    found = memory.advice(
        micro_batch_size=1,
        recompute="full",
        zero=0,
        data_parallel=replicas,
        tensor_parallel=2,
        attention_dropout=0.1,
    )
    assert found == said


def test_the_host_runs_out_too() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert memory.ran_out(caught.value)
    told = memory.explained(caught.value, where="rank 0", memory=None, advice=[], saved=False)
    assert str(told) == "CPU out of memory (rank 0): 4194304.00 GiB were asked for"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("ncclUnhandledCudaError: Cuda failure 2 'out of memory'"), True),
        (RuntimeError("shape [2] is invalid for input of size 3"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_counts_as_running_out(error: Exception, wanted: bool) -> None:
    assert memory.ran_out(error) == wanted


def test_it_ends_with_its_line_and_no_traceback() -> None:
    program = (
        "import sys, torch\n"
        "import torch.distributed as dist\n"
        "from torch._C._distributed_c10d import HashStore\n"
        "from elastic.trainer.watch import memory\n"
        "sys.excepthook = lambda kind, error, trace: print(kind.__name__)\n"  # as the agent's, which reports
        "dist.init_process_group('gloo', store=HashStore(), rank=0, world_size=1)\n"  # torch's names the rank
        "def train():\n"
        "    try:\n"
        "        torch.empty(2**50)\n"
        "    except RuntimeError as error:\n"
        "        raise memory.explained(error, where='rank 0', memory=None, advice=[], saved=True) from None\n"
        "try:\n"
        "    train()\n"
        "except memory.OutOfMemoryError as error:\n"
        "    sys.exit(memory.end(error))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == "OutOfMemoryError\n", "what hooks are told tells the master what it was"
    (line,) = done.stderr.splitlines()
    assert line == (
        "CPU out of memory (rank 0): 4194304.00 GiB were asked for; the last checkpoint is kept"
    )


def test_tags_are_megatrons() -> None:
    tags = memory.scalars(USED)
    assert tags["mem-max-allocated-bytes"] == 72 * GIB
    assert tags["mem-allocated-count"] == 9
    assert memory.of_device(torch.device("cpu")) is None


def test_without_a_gpu_there_is_no_history(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with memory.recorded(tmp_path / "snapshot.pickle", 0):
        pass
    assert "no effect without a GPU" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert memory.of_rank(Path("a/snapshot.pickle"), 3) == Path("a/snapshot.3.pickle")
    assert memory.of_rank(Path("a/snapshot.pickle"), 0) == Path("a/snapshot.pickle")


def test_a_snapshot_that_has_no_place_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(
            UsageError, match=r"--memory-snapshot-path .* cannot be written: .*; name another"
        ),
        memory.recorded(tmp_path / "file" / "folder" / "snapshot.pickle", 3),
    ):
        pass

"""The benchmark that reads profiles."""

import gzip
import json
from pathlib import Path

from benchmarks import kernels
from benchmarks.kernels import Gap, Kernel


def test_gaps_are_what_no_stream_fills(tmp_path: Path) -> None:
    spans = [
        ("flash_fwd", 0, 4), ("nccl", 1, 7), ("gemm", 2, 1), ("triton_add", 9, 2), ("gemm", 14, 1),
    ]  # fmt: skip
    events = [
        {"cat": "kernel", "name": name, "ts": 100 + at, "dur": spent} for name, at, spent in spans
    ]
    host = {"cat": "cpu_op", "name": "gemm", "ts": 0, "dur": 999}
    copy = {"cat": "gpu_memcpy", "name": "Memcpy", "ts": 90, "dur": 1, "args": {"bytes": 64}}
    events.append(copy)
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(
        gzip.compress(json.dumps({"traceEvents": [host, *reversed(events)]}).encode())
    )
    found = kernels.read(trace)
    assert found[:2] == [Kernel("Memcpy of 64 bytes", 90, 91), Kernel("flash_fwd", 100, 104)]
    assert kernels.gaps(found[1:]) == [Gap(3, "triton_add", "gemm"), Gap(1, "nccl", "triton_add")]


def test_kinds_of_kernels() -> None:
    names = {
        "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma",
        "products": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "collectives": "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "compiled": "triton_poi_fused_gelu_0",
        "copies": "Memcpy HtoD (Pinned -> Device)",
        "other": "void at::native::vectorized_elementwise_kernel<4>",
    }
    assert {kind: kernels.kind(name) for kind, name in names.items()} == {
        name: name for name in names
    }

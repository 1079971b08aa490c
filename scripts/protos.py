"""Generates proto/*_pb2* again: `make protos`.

The output is committed, so that an install needs no compiler. tests/test_layout.py fails when it is
not what grpcio-tools 1.71 writes; later versions write code that refuses protobuf 5.
"""

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]


def generate(out: Path) -> None:
    """Write what protoc makes of elastic/proto/*.proto under `out`, at elastic/proto/."""
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("elastic/proto/*.proto"))
    includes = [f"-I{ROOT}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", *includes, *outputs, *sources])
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")


if __name__ == "__main__":
    generate(ROOT)

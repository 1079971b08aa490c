"""No byte of a file, slot or socket of ours reaches pickle: nothing here imports it, and ruff says so."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("elastic", "agent", "k8s", "master", "proto", "trainer")
MODULES = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NAMES = {
    "allow_pickle", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
"""What goes by way of pickle, whoever offers it."""
LOADERS = {("torch", "load"), ("torch", "save"), ("numpy", "load"), ("np", "load")}
EXCEPTIONS = {
    "agent/call.py",
    "elastic/checkpoint/dcp.py",
    "elastic/checkpoint/tools/foreign.py",
    "elastic/launch.py",
}
"""Files that may, each with its sentence in docs/security.md."""


def uses(text: str) -> Iterator[str]:
    """What of a module's text would let bytes reach pickle."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if node.module.split(".")[0] in MODULES or (node.module, alias.name) in LOADERS:
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in NAMES or (owner, node.attr) in LOADERS:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.keyword) and node.arg in NAMES:
            yield str(node.arg)


def test_nothing_reaches_pickle() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).glob("**/*.py"))]
    files = [file for file in files if not any(part.is_symlink() for part in file.parents)]
    assert len(files) > 80
    found = {
        str(file.relative_to(ROOT)): names
        for file in files
        if (names := list(uses(file.read_text())))
    }
    assert found.keys() == EXCEPTIONS


SAMPLES = (
    "import pickle as p", "from pickle import loads", "import shelve", "import marshal", "import dill",
    "import cloudpickle", "import joblib", "from torch import load", "import torch\ntorch.load(1)",
    "import torch as t\nt.save(1, 2)", "import numpy as np\nnp.load(1, allow_pickle=True)",
    "from numpy import load as read",
)  # fmt: skip


@pytest.mark.parametrize("sample", SAMPLES)
def test_ruff_refuses_it_too(sample: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "elastic/sample.py"]
    command += ["--no-cache", "--output-format", "concise", "-"]
    done = subprocess.run(
        command, input=sample, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "TID251" in done.stdout, done
    assert "pickle" in done.stdout


@pytest.mark.parametrize("sample", [s for s in SAMPLES if " as t\n" not in s])
def test_what_is_looked_for_is_found(sample: str) -> None:
    assert list(uses(sample))

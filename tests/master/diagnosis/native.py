"""Files that fail as real ones do: small libraries and scripts, written anew for each case."""

import subprocess
from pathlib import Path

_SOURCES = {
    "fused_kernels.c": "int fused_adam_cuda_launch(void); int go(void) "
    "{ return fused_adam_cuda_launch(); }",
    "newer.c": "void newer(void); void go(void) { newer(); }",
    "stub.c": "void newer(void) {}",
    "throw.cc": '#include <thread>\n#include <stdexcept>\nextern "C" void throw_in_thread() '
    '{ std::thread t([] { throw std::runtime_error("tensor descriptor is stale"); }); t.join(); }',
    "syntax.py": "import torch\n\n\ndef main()\n    print(torch.__version__)\n\n\nmain()\n",
    "indent.py": "def main():\n    depth = 12\n      width = 768\n\n\nmain()\n",
    "no-execute.sh": "#!/bin/sh\nexec python train.py\n",
}


def build(folder: Path) -> None:
    """libfused_kernels.so lacks a symbol, libnewer.so wants a newer libstdc++, libthrow.so throws."""
    for name, text in _SOURCES.items():
        (folder / name).write_text(text)
    (folder / "versions").write_text("GLIBCXX_3.4.99 { newer; };")
    stub = folder / "stub"
    stub.mkdir()
    shared = ("-shared", "-fPIC")
    runtime = str(stub / "libstdc++.so.6")
    script = "-Wl,--version-script=versions"
    commands = (
        ("gcc", *shared, "fused_kernels.c", "-o", "libfused_kernels.so"),
        ("gcc", *shared, "stub.c", script, "-Wl,-soname,libstdc++.so.6", "-o", runtime),
        ("gcc", *shared, "newer.c", "-o", "libnewer.so", runtime),
        ("g++", *shared, "throw.cc", "-o", "libthrow.so", "-pthread"),
    )
    for command in commands:
        subprocess.run(command, cwd=folder, check=True)

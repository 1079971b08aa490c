"""Command lines of our own helper programs, which need no installed `elastic` and no PYTHONPATH."""

import os

# The folder that holds `elastic` is on the path only while the program's module is imported: what
# is imported later (a script's modules, by the standby) is looked for where the script would look.
_CODE = (
    "import sys, importlib; r, m = sys.argv[1:3]; "
    "sys.path[:] = [p for p in sys.path if p]; sys.path.insert(0, r); "
    "m = importlib.import_module(m); sys.path.remove(r); m.main(sys.argv[3:])"
)


def command(python: str, module: str, *args: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Run `main(args)` of `module`; `flags` are the interpreter's."""
    return [python, *flags, "-c", _CODE, root(), module, *args]


def root() -> str:
    """The folder to have on sys.path for `import elastic`."""
    import elastic

    return os.path.dirname(os.path.abspath(next(iter(elastic.__path__))))

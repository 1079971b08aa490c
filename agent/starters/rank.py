"""What a fork of the standby does to be what `python -u script.py` would be.

Compared with a fresh process by `tests/agent/starters/test_starters.py`. What differs, by the nature
of it: torch and what else was preloaded is imported already; ranks share one hash seed;
`/proc/<pid>/environ` shows the title; a few frames of ours lie below the script's in
`sys._getframe()` and `traceback.print_stack()` (not in tracebacks); numpy's BLAS keeps the one thread
it started with.
"""

import builtins
import contextlib
import gc
import io
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer, read_code
from types import CodeType, ModuleType, TracebackType
from typing import Any

from setproctitle import setproctitle, setthreadtitle

from elastic.agent import hook
from elastic.agent.starters.spec import RUN_PATH, StartSpec
from elastic.proto import env


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """The standby as it was before it imported anything of the script's."""

    environ: dict[str, str]
    path: tuple[str, ...]
    """`sys.path` of a fresh process, but for its first entry."""


def become(spec: StartSpec, environ: dict[str, str], before: Before) -> None:
    """Make this fork a fresh process in all that a script can see; then call `run`."""
    variables = env.process_environment()
    variables.clear()
    variables.update(environ)
    command = spec.command()
    setproctitle(spec.title or " ".join(command))
    setthreadtitle(os.path.basename(spec.python))
    _restore_signals()
    sys.orig_argv[:] = command
    _set_arguments(spec, before)
    sys.modules["__main__"] = _main_module(spec)
    if spec.kind == "module":
        sys.modules.pop(spec.target, None)  # of a rehearsal: runpy would warn of it
    _reseed()
    _forget()
    torch = sys.modules["torch"]
    torch.set_num_threads(spec.threads or default_threads(environ))
    gc.enable()
    hook.install()


def run(spec: StartSpec) -> None:
    """Run the script, and end as a fresh interpreter would.

    Raises SystemExit (or KeyboardInterrupt) through to the interpreter, which then does all that it
    does at its end: threads, exit handlers, buffers, and the status.
    """
    try:
        _execute(spec)
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        _report(error)
        sys.excepthook = lambda kind, error, trace: None  # it has been reported
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter
        _report(error)
        raise SystemExit(1) from None


def default_threads(environ: dict[str, str]) -> int:
    """Intra-op threads that torch would choose in a fresh process with that environment."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = environ.get(name, "").partition(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return int(first)
    cpus = os.sched_getaffinity(0)
    if not sys.modules["torch"].backends.mkl.is_available():
        return len(cpus)
    cores = set()
    for cpu in cpus:  # MKL counts cores, not their threads
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _restore_signals() -> None:
    """What Python sets when it starts; all else is as its parent left it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _set_arguments(spec: StartSpec, before: Before) -> None:
    """`sys.argv` and `sys.path`."""
    match spec.kind:
        case "module":
            sys.argv, first = ["-m", *spec.args], os.getcwd()
        case "run_path":
            sys.argv, first = ["-c", spec.target, *spec.args], ""
        case _:
            sys.argv = [spec.target, *spec.args]
            first = os.path.dirname(os.path.realpath(spec.target))
    sys.path[:] = before.path if sys.flags.safe_path else [first, *before.path]
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:  # a folder that was not there when the standby looked
            del sys.path_importer_cache[path]


def _main_module(spec: StartSpec) -> ModuleType:
    """`__main__` as the interpreter makes it."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=BuiltinImporter)
    if sys.version_info < (3, 14):
        main.__dict__["__annotations__"] = {}  # noqa: RUF063 - a new module has none
    if spec.kind == "script":
        path = os.path.abspath(spec.target)
        loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
    _mains.append(sys.modules["__main__"])  # the interpreter is in the midst of running it
    return main


_mains: list[ModuleType] = []


def _reseed() -> None:
    """Generators that a fresh process seeds from the system: Python's, numpy's and torch's own."""
    random.seed()
    if "numpy.random.mtrand" in sys.modules:
        sys.modules["numpy.random"].seed()
    sys.modules["torch"].default_generator.seed()


def _forget() -> None:
    """State of the standard library that a process should not share with its siblings."""
    thread: Any = threading.main_thread()
    if thread.native_id != os.getpid() and hasattr(thread, "_set_native_id"):
        thread._set_native_id()  # before Python 3.13 a fork leaves the parent's
    tempfile.tempdir = None
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.ORIGINAL_DIR = os.getcwd()
        process.current_process().authkey = os.urandom(32)


# --- running ---


def _execute(spec: StartSpec) -> None:
    main = sys.modules["__main__"]
    if spec.kind == "module":
        runpy._run_module_as_main(spec.target)  # type: ignore[attr-defined]  # what -m itself calls
    elif spec.kind == "run_path":
        exec(compile(RUN_PATH, "<string>", "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - as -c
    elif get_importer(spec.target) is not None:  # a folder or an archive with a __main__.py
        sys.path[0] = spec.target
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        exec(_code(spec), main.__dict__)  # noqa: S102 - the script


def _code(spec: StartSpec) -> CodeType:
    path = os.path.abspath(spec.target)
    try:
        with io.open_code(path) as file:
            compiled = read_code(file) if path.endswith(".pyc") else None
            source = b"" if compiled is not None else file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None
    code: CodeType = compiled or compile(source, path, "exec", dont_inherit=True)
    return code


def _report(error: BaseException) -> None:
    """What the interpreter does with an exception that nobody caught, our frames left out."""
    trace = _without_ours(error.__traceback__)
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit:
        raise
    except BaseException as second:  # noqa: BLE001 - as the interpreter
        second.__traceback__ = _without_ours(second.__traceback__)
        second.__context__ = None
        sys.stderr.write("Error in sys.excepthook:\n")
        sys.__excepthook__(type(second), second, second.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)
    with contextlib.suppress(Exception):
        sys.stderr.flush()


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace

"""Inside the user's process: how the agent learns about a script that was not written for it.

Installed by `startup/sitecustomize.py` in a spawned rank and by `starters/rank.py` in a forked one.
It waits for the first import of torch, notes the environment then, claims the progress page, and
from there on turns optimizer steps into signs of life. An exception that ends the script is told to
the agent. Imports next to nothing, since it runs before the script; never imports torch itself; and
whatever goes wrong in it goes no further.
"""

import contextlib
import gc
import os
import sys
from os import getpid
from time import monotonic_ns
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from elastic.proto import env

if TYPE_CHECKING:
    import socket
    import traceback
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

    from elastic.agent.device_times import DeviceTimes
    from elastic.proto.link import Message
    from elastic.proto.page import PageWriter

TICKS, TICK_NS = 3, 4
BEATS, WAITED_NS, RING, KEPT = 32, 33, 64, 128
"""As in proto/page.py, in words of 8 bytes."""

MOST_OTHERS = 1000
"""Steps of other optimizers in a row, after which one of them is the script's."""
SEND_TIMEOUT = 5.0
"""Seconds that a message to the agent may hold the script up; then the link is given up."""


class Attachment:
    """This process's claim on its rank's page, and its end of the link."""

    def __init__(self, page: "PageWriter", link: int | None) -> None:
        """link: the inherited descriptor, which stays the script's to close."""
        self.page = page
        self._link = link
        self._identity = _identity(link)
        self.told_step = False
        """`elastic.session` has told a step's number."""
        self.rehearsal: tuple[str, ...] = ()
        """What it was told that spares are to call."""

    def leave(self) -> None:
        """In a fork, which is no rank: by the end of its link the agent hears that the rank has failed."""
        if self._link is not None and _identity(self._link) == self._identity:
            os.close(self._link)
        self._link = None

    def open_link(self) -> "socket.socket | None":
        """Our end of the link, under a number of its own, to be closed after use.

        None where there is none, and where the script has closed it: its number may be another
        file's by now.
        """
        import socket

        if self._link is None or _identity(self._link) != self._identity:
            self._link = None
            return None
        return socket.socket(fileno=os.dup(self._link))

    def send(self, message: "Message", fds: "Sequence[int]" = ()) -> bool:
        """Tell the agent, with descriptors for it, and say whether that went well."""
        with contextlib.suppress(OSError):
            link = self.open_link()
            if link is not None:
                with link:
                    if _send(link, message, fds):
                        return True
        self._link = None  # half a line may be on it
        return False


def _identity(fd: int | None) -> tuple[int, int] | None:
    """Which file a descriptor stands for; None if for none."""
    if fd is None:
        return None
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_attachment: Attachment | None = None
_installed_in = 0
"""Pid of the process that `install` was called in; a fork of it is no rank."""


def attach() -> Attachment | None:
    """Claim this rank's page, once; None outside a rank, and in every process but its first."""
    global _attachment
    if _attachment is not None:
        return _attachment if _attachment.page.pid == os.getpid() else None
    if _installed_in not in (0, os.getpid()):
        return None
    variables = env.process_environment()
    fd = variables.get(env.PAGE_FD, "")
    if not fd.isdecimal():
        return None
    from elastic.proto.errors import ElasticError
    from elastic.proto.page import PageWriter

    try:
        page = PageWriter.claim(int(fd), os.getpid())
    except (ElasticError, OSError, OverflowError):
        return None  # a descriptor that means something else in this process
    if page is None:
        return None
    _attachment = Attachment(page, _inherited_link())
    os.register_at_fork(after_in_child=_attachment.leave)
    return _attachment


def install() -> None:
    """Begin to follow this process; call it before the script runs. Does nothing twice."""
    global _installed_in
    if _installed_in:
        return
    _installed_in = os.getpid()
    _chain_excepthook()
    _wait_for("torch", _before_torch, _after_torch)


def _inherited_link() -> int | None:
    """The number of our end of the link."""
    import socket

    fd = env.process_environment().get(env.LINK_FD, "")
    with contextlib.suppress(OSError, ValueError):
        link = socket.socket(fileno=int(fd))
        kind = (link.family, link.type)
        if kind == (socket.AF_UNIX, socket.SOCK_STREAM):
            return link.detach()
        link.detach()  # somebody else's
    return None


def _send(link: "socket.socket", message: "Message", fds: "Sequence[int]") -> bool:
    """Send one message within `SEND_TIMEOUT`; whether all of it went."""
    import socket
    from time import monotonic

    from elastic.proto.errors import LinkError
    from elastic.proto.link import encode

    try:
        rest = memoryview(encode(message))
    except (LinkError, ValueError, TypeError):
        return True  # too much to tell; nothing of it went out
    deadline = monotonic() + SEND_TIMEOUT
    try:
        while rest:
            link.settimeout(max(0.001, deadline - monotonic()))
            sent = socket.send_fds(link, [rest], list(fds), socket.MSG_NOSIGNAL)
            rest, fds = rest[sent:], ()
    except OSError:
        return False
    return True


# --- imports that we wait for ---


class _Finder:
    """On `sys.meta_path`: lets the others find a module, and is told when it is really imported."""

    def __init__(
        self, name: str, before: "Callable[[], None]", after: "Callable[[], None]"
    ) -> None:
        self._name = name
        self._before = before
        self._after = after
        self._looking = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: ModuleType | None = None
    ) -> "ModuleSpec | None":
        if name != self._name or self._looking:
            return None
        import importlib.util

        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        # The loader itself stays what it is, since tools look at a module's `__loader__`.
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module"):
            with contextlib.suppress(AttributeError):
                loader.exec_module = self._around(loader, loader.exec_module)
        return spec

    def _around(
        self, loader: Any, execute: "Callable[[ModuleType], None]"
    ) -> "Callable[[ModuleType], None]":
        def exec_module(module: ModuleType) -> None:
            with contextlib.suppress(AttributeError):
                del loader.exec_module
            _quietly(self._before)
            # What an import makes stays; to look for garbage in it, again and again, is an eighth of torch's
            # time, and a second of each rank's when it ends.
            collects = gc.isenabled()
            gc.disable()
            try:
                execute(module)
            finally:
                gc.freeze()
                if collects:
                    gc.enable()
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)
            _quietly(self._after)

        return exec_module


def _wait_for(name: str, before: "Callable[[], None]", after: "Callable[[], None]") -> None:
    """Call both around the import of a module, or `after` alone where it is there already."""
    if name in sys.modules:
        _quietly(after)
    else:
        sys.meta_path.insert(0, _Finder(name, before, after))


def _nothing() -> None:
    """Nothing to do."""


def _before_torch() -> None:
    attachment = attach()
    if attachment is None:
        return
    from elastic.proto.link import TorchNote

    environ = dict(env.process_environment())
    attachment.send(TorchNote(environ=environ, argv=tuple(sys.argv), path=tuple(sys.path)))


def _after_torch() -> None:
    """Have torch call us after every optimizer step."""
    attachment = attach()
    if attachment is None:
        return
    optimizer = sys.modules["torch.optim.optimizer"]
    optimizer.register_optimizer_step_post_hook(_Ticker(attachment).tick)
    _wait_for(_DYNAMO_RULES, _nothing, keep_out_of_graphs)
    _quietly(_offer_stacks, attachment)
    from elastic.agent import recorder

    _wait_for(recorder.C10D, _nothing, lambda: _after_distributed(attachment))


def _after_distributed(attachment: Attachment) -> None:
    import atexit

    from elastic.agent import gloo, recorder, waits

    atexit.register(_quietly, gloo.let_finish, os.getpid())
    recorder.follow(attachment)
    waits.follow(attachment.page)


def _offer_stacks(attachment: Attachment) -> None:
    """For an agent that may not read our memory, as in many containers, and gets no answer of the recorder's: by a
    signal that C code handles, so also where the GIL is held."""
    import faulthandler
    import fcntl
    import signal

    from elastic.proto.link import StacksOffered
    from elastic.proto.looks import DUMP_SIGNAL

    if signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL:
        return  # the script's own
    fd = os.memfd_create("elastic-stacks", os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True, chain=False)
    attachment.send(StacksOffered(fd=fd), (fd,))


_DYNAMO_RULES = "torch._dynamo.trace_rules"


def keep_out_of_graphs() -> None:
    """A compiled `optimizer.step` calls us, and does not try to compile us. Does nothing twice."""
    from elastic.agent import device_times, waits

    rules = sys.modules[_DYNAMO_RULES]
    if __file__ not in rules.SKIP_DIRS:
        rules.add(__name__)
        rules.add(waits.__name__)
        rules.add(device_times.__name__)


# --- optimizer steps ---


class _Ticker:
    """What torch calls after each `Optimizer.step`; several times a step with some optimizers."""

    def __init__(self, attachment: Attachment) -> None:
        self._words = attachment.page.words
        self._first = True
        self._leader = 0
        """Of several optimizers the one that stepped first: its steps are the script's."""
        self._others = 0
        """Steps of the others since its last: it may be gone, as where a script unfreezes layers."""
        self._pid = os.getpid()
        self._device: DeviceTimes | None = None
        """Of a rank that computes on a GPU."""

    def tick(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """About a microsecond, and no call of a function in Python but on a GPU. Does nothing in a fork of us."""
        if getpid() != self._pid:
            return
        words = self._words
        words[TICK_NS] = now = monotonic_ns()
        words[TICKS] += 1
        if self._first:
            self._first, self._leader = False, id(optimizer)
            dynamo = sys.modules.get("torch._dynamo")  # which would compile what we call, too
            first = self._first_step
            _quietly(first if dynamo is None else dynamo.disable(first))
        if id(optimizer) != self._leader:
            self._others += 1
            if self._others > MOST_OTHERS:
                self._leader = id(optimizer)
        else:
            self._others = 0
            number = words[BEATS] + 1
            at = RING + number % KEPT * 2
            words[at], words[at + 1] = now, words[WAITED_NS]
            words[BEATS] = number
            if self._device is not None:
                self._device.step_ends(number, now)

    def _first_step(self) -> None:
        from elastic.agent import device_times

        _quietly(_tell_first_step)
        if _attachment is not None:
            self._device = device_times.follow(_attachment.page, lambda: self._leader)


def _tell_first_step() -> None:
    if _attachment is None:
        return
    from elastic.proto.link import FirstStep, ModulesNote

    note = ModulesNote(
        modules=tuple(_site_modules()),
        environ=dict(env.process_environment()),
        rehearsal=_attachment.rehearsal,
    )
    _attachment.send(note)
    _attachment.send(FirstStep(step=1))


COMPILER = "torch._inductor.compile_fx"
"""What torch imports where something is compiled, and takes most of a second to."""


def _site_modules() -> list[str]:
    """Imported from site-packages, in the order of import; torch's own left out, but for its compiler. Ours are
    among them, also of a checkout, but for what the standby is made of."""
    skipped = (
        "torch.", "torchgen.", "functorch.", "elastic.agent.", "elastic.proto.", "sitecustomize.",
        "usercustomize.",
    )  # fmt: skip
    names = []
    for name, module in list(sys.modules.items()):
        spec: Any = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
        origin = getattr(spec, "origin", None)
        if not isinstance(origin, str) or spec.name != name:
            continue
        if f"{name}.".startswith(skipped) and name != COMPILER:
            continue
        installed = "site-packages" in origin or "dist-packages" in origin
        if installed or name.startswith("elastic."):
            names.append(name)
    return names


# --- an exception that ends the script ---


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _quietly(_tell_error, kind, error, trace)
        previous(kind, error, trace)

    sys.excepthook = excepthook


def _tell_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """The rank's own process tells; a wrapper that failed before any import of torch does, too."""
    # An interrupt has its own exit status, which our imports would change: `exec` of a text makes
    # the interpreter forget that an interrupt is what it ends by.
    attachment = None if issubclass(kind, KeyboardInterrupt) else attach()
    if attachment is None:
        return
    import traceback

    from elastic.proto.link import ErrorNote

    frames = traceback.extract_tb(trace)
    if isinstance(error, SyntaxError):  # it is where the parser stood, which no frame tells
        frames.append(
            traceback.FrameSummary(
                error.filename or "", error.lineno or 0, "<module>", lookup_line=False
            )
        )
    attachment.send(
        ErrorNote(
            type=kind.__name__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}",
            message=str(error),
            frame=_innermost(frames),
            traceback="".join(traceback.format_exception(kind, error, trace)),
        )
    )


def _innermost(frames: "traceback.StackSummary") -> str:
    """`file:line in function` of the user's innermost frame, or of the innermost at all."""
    own = [frame for frame in frames if not _foreign(frame.filename)]
    for frame in reversed(own or frames):
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""


def _foreign(filename: str) -> bool:
    """Whether a file is a library's: installed, Python's own, what we put around torch's, or no file at all."""
    if filename.startswith(os.path.dirname(__file__) + os.sep):
        return True
    if filename.startswith("<") or "site-packages" in filename or "dist-packages" in filename:
        return True
    return filename.startswith(os.path.dirname(os.__file__) + os.sep)


def _quietly(function: "Callable[..., object]", *args: Any) -> None:
    """Call it, and let nothing of what goes wrong reach the script."""
    with contextlib.suppress(Exception):
        function(*args)

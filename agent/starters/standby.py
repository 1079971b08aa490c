"""`python -m elastic.agent.starters.standby FD`: has torch imported and becomes a rank by a fork.

Launched by `Starter.launch` with the environment that the script had when it imported torch, one
OpenMP thread, and PyTorch's NVML check for devices. It has one thread, the main one, always: a fork
would lose any other.
"""

import gc
import importlib
import json
import os
import shutil
import sys
import time
import warnings
from types import ModuleType
from typing import Any

from setproctitle import setproctitle

from elastic.agent import hook, store
from elastic.agent.starters import fork, preload, rank, spare
from elastic.agent.starters.spec import OBEYED_AT_START, StartSpec
from elastic.proto import descriptors, env

IMPORTS = ("torch", "torch.distributed", "torch._dynamo")

OURS = ("elastic.proto.link", "elastic.proto.page", "traceback")
"""What the hook imports when it is needed: here once, rather than in each rank."""


def main(args: list[str]) -> None:
    """Serve the starter protocol on the descriptor `args[0]`; in a fork, be the rank."""
    channel = fork.open_channel(int(args[0]))
    setproctitle("elastic-standby")
    gc.disable()  # an import's objects stay: to look for garbage among them takes a fifth of its time
    start = time.monotonic()
    before = rank.Before(environ=dict(env.process_environment()), path=tuple(sys.path))
    for name in env.OF_TORCHRUN:
        env.process_environment().pop(name, None)
    for module in (*IMPORTS, *OURS):
        importlib.import_module(module)
    hook.keep_out_of_graphs()
    _settle()
    seconds = time.monotonic() - start
    channel.send({"ready": True, "seconds": seconds, "threads": preload.threads()})
    standby = _Standby(channel, before)
    request = standby.serve()
    if request is None:
        return
    if request.spec.kind == "store":
        store.become(request)
    if request.spec.kind == "spare":
        request = spare.wait(request, standby.late)
    environ = fork.prepare(request)
    rank.become(request.spec, environ, before)
    rank.run(request.spec)


class _Standby:
    """The loop: starts at once, trials of modules beside it."""

    def __init__(self, channel: fork.Channel, before: rank.Before) -> None:
        self._channel = channel
        self._before = before
        self._queue: list[str] | None = None
        self._trial: preload.Trial | None = None
        self._loaded: list[str] = []
        self._refused: dict[str, str] = {}
        self.late: list[str] = []
        """Modules for whoever is forked once more and then never."""
        self._began = 0.0

    def serve(self) -> fork.Request | None:
        """Returns None when the agent has closed its end, and in a new process its request."""
        while True:
            if self._queue is not None and self._trial is None:
                self._next_trial()
            if self._wait():
                received = fork.receive(self._channel)
                if received is None:
                    return None
                request = self._handle(*received)
                if request is not None:
                    return request
            if self._trial is not None and self._over(self._trial):
                self._finish(self._trial)

    def _wait(self) -> bool:
        """Until a message is there, or the trial ends or is too long; whether there is a message."""
        fds, timeout = [self._channel.socket.fileno()], None
        if self._trial is not None:
            fds.append(self._trial.pidfd)
            timeout = max(0.0, self._trial.deadline - time.monotonic())
        return fds[0] in descriptors.ready(fds, timeout)

    def _handle(self, message: dict[str, Any], fds: list[int]) -> fork.Request | None:
        if "start" in message:
            request = fork.start(self._channel, message, fds, unfit=self._unfit)
            if request is not None and self._trial is not None:
                os.close(self._trial.pidfd)
                os.close(self._trial.verdict)
            return request
        if "preload" in message:
            self._queue = [str(name) for name in json.loads(fork.read_memory(fds[0]))]
            self._loaded, self._refused, self._began = [], {}, time.monotonic()
            self.late = []
        for fd in fds:
            os.close(fd)
        return None

    def _unfit(self, spec: StartSpec) -> str | None:
        """Why a fork of this process would not be what a fresh one is."""
        if spec.kind == "program":
            return "a standby starts Python scripts only"
        found = shutil.which(spec.python, path=spec.environ.get("PATH"))
        if found is None or os.path.abspath(found) != sys.executable:
            return f"the standby runs {sys.executable}, not {spec.python}"
        if spec.kind in ("store", "spare"):
            return None
        names = {n for n in (*spec.environ, *self._before.environ) if n.startswith(OBEYED_AT_START)}
        for name in sorted(names):
            if spec.environ.get(name) != self._before.environ.get(name):
                return f"{name} is not what it was when the standby started"
        return None

    def _next_trial(self) -> None:
        """Begin with the next module that is not there yet, or report that there is none."""
        while self._queue:
            module = self._queue.pop(0)
            if module in sys.modules:
                self._loaded.append(module)
                continue
            self._trial = preload.try_import(module)
            return
        self._queue = None
        self._channel.send(
            {
                "preloaded": self._loaded,
                "refused": self._refused,
                "seconds": time.monotonic() - self._began,
            }
        )

    @staticmethod
    def _over(trial: preload.Trial) -> bool:
        ended = bool(descriptors.ready([trial.pidfd], 0))
        return ended or time.monotonic() >= trial.deadline

    def _finish(self, trial: preload.Trial) -> None:
        self._trial = None
        refusal = trial.finish()
        if refusal is None:
            try:
                importlib.import_module(trial.module)
            except Exception as error:  # noqa: BLE001 - a module may raise anything
                reason = f"its import fails: {type(error).__name__}: {error}"
                refusal = preload.Refusal(reason=reason)
        if refusal is None:
            self._loaded.append(trial.module)
        else:
            self._refused[trial.module] = refusal.reason
            if refusal.for_forks:
                self.late.append(trial.module)
        if preload.threads() > 1:  # the trial went well and this did not: not fit to fork any more
            raise SystemExit(f"elastic: a thread was left behind by the import of {trial.module}")
        _settle()


def _settle() -> None:
    """Leave to the forks what lives now: their collector need not touch it, nor copy its pages."""
    warnings.onceregistry.clear()  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):  # a rank warns once of what we have warned of already
            vars(module).pop("__warningregistry__", None)
    gc.freeze()  # without a collection, which takes half a second and finds next to nothing


if __name__ == "__main__":
    from elastic.agent.starters import standby

    standby.main(sys.argv[1:])

"""What all programs of probes share: their answers, and nothing else, on standard output."""

import argparse
import contextlib
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from elastic.agent.prctl import set_pdeathsig
from elastic.agent.probes.answers import Answer, encode

LEVELS = ("quick", "full")


class Fault(Exception):
    """What a probe found wrong, in words."""

    def __init__(self, what: str, figures: Mapping[str, float] | None = None) -> None:
        super().__init__(what)
        self.figures = figures or {}


class NotKnown(Exception):
    """Why a probe can say nothing here, in words."""


class Clock:
    """When parts of a step began and were over."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, float]] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.note(name, (began, time.monotonic()))

    def note(self, name: str, span: tuple[float, float]) -> None:
        """span: when it began and was over, on the monotonic clock."""
        self._parts[name] = span

    def take(self) -> Mapping[str, tuple[float, float]]:
        """Those since they were last taken."""
        parts, self._parts = self._parts, {}
        return parts


def begin(parent: int | None) -> TextIO:
    """Where answers go. Whatever else is printed, by NCCL say, goes to standard error. Ends this process
    with its parent, if that is known."""
    gc.disable()  # what is imported stays, and a probe is soon over: to look for garbage is a fifth of torch's import
    if parent is not None:
        set_pdeathsig()
        if os.getppid() != parent:  # it died before that
            raise SystemExit(1)
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def tell(answers: TextIO, answer: Answer) -> None:
    answers.write(encode(answer) + "\n")
    answers.flush()


def ask(probe: str, work: Callable[[], Mapping[str, float]]) -> Answer:
    """Run a probe; its answer, whatever comes of it."""
    try:
        return Answer(probe=probe, ok=True, figures=work())
    except Fault as fault:
        return Answer(probe=probe, ok=False, what=str(fault), figures=fault.figures)
    except NotKnown as reason:
        return Answer(probe=probe, ok=True, what=str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a sick device raises is the finding
        name = type(error).__name__
        if name == "OutOfMemoryError":  # torch's: somebody else has it
            return Answer(probe=probe, ok=True, what="the device has no memory left to try it in")
        words = (str(error).strip() or "no words").splitlines()[0]
        return Answer(probe=probe, ok=False, what=f"{name}: {words}"[:500])


def parser(probe: str, doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m elastic.agent.probes.{probe}", description=doc)
    made.add_argument("--level", choices=LEVELS, default="quick")
    made.add_argument("--parent", type=int, metavar="PID", help="that this is not to outlive")
    return made

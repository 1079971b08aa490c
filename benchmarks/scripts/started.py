"""`pretrain_gpt`, whose ranks note when they have passed what a start is made of: JSON lines in $NOTES."""

import json
import os
import time

BEGAN = time.time()

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.utils import counters

from elastic.checkpoint import Checkpointer
from elastic.trainer import pretrain, pretrain_gpt
from elastic.trainer.run import begin
from elastic.trainer.run import state as states
from elastic.trainer.run.loop import Loop
from elastic.trainer.world import joined


def note(what: str, at: float | None = None, value: object = None) -> None:
    line = {"what": what, "rank": int(os.environ["RANK"]), "pid": os.getpid(), "value": value}
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(line | {"time": at or time.time()}) + "\n")


def noted(owner: Any, name: str, what: str, of: Callable[..., object] = lambda *_: None) -> None:
    """Have the end of `owner`'s function noted, with what `of` makes of its first argument and what it returned."""
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        note(what, value=of(args[0], found))
        return found

    setattr(owner, name, outer)


@contextlib.contextmanager
def joining() -> Iterator[Any]:
    with joined() as world:
        note("join")
        yield world


if __name__ == "__main__":
    note("begin", BEGAN)
    note("import")
    rehearsed = counters["stats"]["unique_graphs"]
    vars(pretrain)["joined"] = joining
    noted(begin, "model", "lay out")
    noted(states, "resume", "restore", lambda _, found: found[0])
    noted(Checkpointer, "save", "save", lambda checkpoint, _: checkpoint.ready)
    noted(Loop, "_step", "step", lambda *_: counters["stats"]["unique_graphs"] - rehearsed)
    pretrain.pretrain(
        pretrain_gpt.train_valid_test_datasets_provider,
        pretrain_gpt.model_provider,
        None,
        pretrain_gpt.forward_step,
    )

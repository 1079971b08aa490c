"""`python -m tests.trainer.watch.phased TOLD.json ARGUMENTS...`: a run that notes when each of its steps asks for
its samples, by a clock of its own, and when the last one has ended."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from elastic.trainer import pretrain_gpt
from elastic.trainer.pretrain import pretrain
from elastic.trainer.run.feed import Feed
from elastic.trainer.run.told import Numbers

if __name__ == "__main__":
    began: list[float] = []
    inner, end = Feed.__next__, Numbers.end
    training = True

    def asked(feed: Feed) -> Any:
        if training:  # not an evaluation
            began.append(time.monotonic())
        return inner(feed)

    def ended(numbers: Numbers, iteration: int) -> None:
        global training
        end(numbers, iteration)
        began.append(time.monotonic())
        training = False

    setattr(Feed, "__next__", asked)  # noqa: B010 - the type of what wraps differs
    setattr(Numbers, "end", ended)  # noqa: B010 - as above
    place = Path(sys.argv.pop(1))
    pretrain(
        pretrain_gpt.train_valid_test_datasets_provider, pretrain_gpt.model_provider, None,
        pretrain_gpt.forward_step,
    )  # fmt: skip
    place.write_text(json.dumps(began))

"""What a run is trained on and evaluated with follows its arguments."""

from pathlib import Path

import numpy as np

from elastic.trainer.arguments.parse import parse
from elastic.trainer.data import tokenizers
from elastic.trainer.data.gpt_dataset import asked, datasets
from elastic.trainer.data.indexed import write
from tests.trainer.arguments.test_effects import BASE, DATASETS


def test_data_are_what_the_arguments_say(tmp_path: Path) -> None:
    places = {name: str(tmp_path / name) for name in "abc"}
    for name, first in (("a", 0), ("b", 50)):
        with write(tmp_path / name, np.dtype("<u2")) as writer:
            for number in range(60):
                writer.add([*(first + (number * 7 + k) % 40 for k in range(8)), 100])
    found = {"": items("--data-path {a} --split 8,1,1".format(**places), tmp_path)}
    for name, said in DATASETS.items():
        found[name] = items(said.format(**places), tmp_path)
    assert len(set(found.values())) == len(found)


def items(said: str, folder: Path) -> str:
    """All that a run of these arguments gets, and where it keeps its indices."""
    base = BASE.replace("--seq-length 32", "--seq-length 6")
    settings = parse(f"{base} --vocab-size 100 {said}".split())
    made = datasets(settings.data, tokenizers.build(settings.tokenizer), asked(
        40, train_iters=5, eval_interval=5, eval_iters=1, global_batch_size=8
    ))  # fmt: skip
    sets = [one for found in made for one in (found if isinstance(found, list) else [found])]
    told = [
        (getattr(one, "name", ""), key, value.tolist())
        for one in sets
        if one is not None
        for number in range(8)
        for key, value in one[number].items()
    ]
    return f"{told} {(folder / 'c').exists()}"

"""`python -m tests.trainer.parallel.footprints FOLDER`: the peak of a step, and the formula's.

In a world of one: Gloo's threads let go of what they sent when they like. With LayerNorm: RMSNorm is
one kernel only on GPUs.
"""

import re
from dataclasses import replace

import torch

from benchmarks.memory import RECOMPUTE, SMALL, measured
from elastic.trainer.parallel.layout import Layout
from tests.trainer.forks import main

GPT2 = replace(SMALL, num_layers=2, seq_length=128)
LLAMA = replace(
    GPT2, num_query_groups=2, ffn_hidden_size=640, position="rope",
    activation="swiglu", bias=False, tied=False,
)  # fmt: skip
SHAPES = {
    "gpt": GPT2, "llama": LLAMA,
    "dropping": replace(GPT2, seq_length=256, hidden_dropout=0.1, attention_dropout=0.1),
}  # fmt: skip
NAMES = [
    "gpt exact 1", "gpt fast 0 full", "gpt exact 2 selective", "llama fast 3", "llama exact 1",
    "dropping fast 1", "dropping exact 1 selective",
]  # fmt: skip


def find(name: str) -> dict[str, int]:
    match = re.fullmatch(r"(\w+) (exact|fast) (\d)(?: (\w+))?", name)
    assert match is not None
    shape, reduction, zero, again = match.groups()
    layout = Layout(
        exact=reduction == "exact", zero=int(zero), recompute=RECOMPUTE[f"-{again}" if again else ""]
    )  # fmt: skip
    peak, said = measured(SHAPES[shape], layout, torch.device("cpu"))
    return {"peak": peak, "formula": said.total}


if __name__ == "__main__":
    main(dict.fromkeys(NAMES, 1), find)

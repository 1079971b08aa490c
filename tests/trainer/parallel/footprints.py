"""`python -m tests.trainer.parallel.footprints FOLDER KIND`: the peak of a step, and the formula's; and in what order
a pipeline's rank ran its passes.

Pipelines are real ranks. Replicas, and ranks that share layers, are one rank of a world that only it believes in:
Gloo's threads let go of what they reduced when they like. With LayerNorm: RMSNorm is one kernel only on GPUs.
"""

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.memory import RECOMPUTE, SMALL, believe_in, measured
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.parallel.stage import LeanStage
from elastic.trainer.parallel.zero_bubble import Stage
from tests.trainer.forks import main

# A CPU without AVX-512 has no fast product in bf16: what is computed so is small, pipelines are in fp32.
GPT2 = replace(SMALL, num_layers=2, hidden_size=128, seq_length=64)
LLAMA = replace(
    GPT2, num_query_groups=2, ffn_hidden_size=320, position="rope",
    activation="swiglu", bias=False, tied=False,
)  # fmt: skip
DROPPING = replace(GPT2, seq_length=128, hidden_dropout=0.1, attention_dropout=0.1)
SELECTIVE, FULL = RECOMPUTE["-selective"], RECOMPUTE["-full"]


class Case(NamedTuple):
    config: GPTConfig
    layout: Layout
    dp: int = 1


def pipeline(
    config: GPTConfig = GPT2, *, layers: int = 4, compute: torch.dtype = torch.float32, **how: Any
) -> Case:
    ffn = config.ffn_hidden_size and 2 * config.ffn_hidden_size
    larger = replace(
        config, num_layers=layers, hidden_size=2 * config.hidden_size, ffn_hidden_size=ffn,
        seq_length=2 * config.seq_length,
    )  # fmt: skip
    return Case(larger, Layout(pp=2, compute=compute, **how))


CASES = {
    "gpt exact 1": Case(GPT2, Layout()),
    "gpt fast 0 full": Case(GPT2, Layout(exact=False, zero=0, recompute=FULL)),
    "gpt exact 2 selective": Case(GPT2, Layout(zero=2, recompute=SELECTIVE)),
    "llama fast 3": Case(LLAMA, Layout(exact=False, zero=3)),
    "llama exact 1": Case(LLAMA, Layout()),
    "dropping fast 1": Case(DROPPING, Layout(exact=False)),
    "dropping exact 1 selective": Case(DROPPING, Layout(recompute=SELECTIVE)),
    "gpt exact 2 dp2": Case(GPT2, Layout(zero=2), 2),
    "gpt fast 3 dp2": Case(GPT2, Layout(exact=False, zero=3), 2),
    "llama exact 2 dp2": Case(LLAMA, Layout(zero=2), 2),
    "llama exact 3 full dp4": Case(LLAMA, Layout(zero=3, recompute=FULL), 4),
    "gpt exact 1 tp2": Case(GPT2, Layout(tp=2)),
    "llama fast 1 tp2 sp": Case(LLAMA, Layout(tp=2, sequence=True, exact=False)),
}
PIPELINES = {
    "gpt 1f1b": pipeline(), "llama 1f1b full": pipeline(LLAMA, recompute=FULL),
    "gpt gpipe fast": pipeline(schedule="gpipe", exact=False),
    "gpt interleaved": pipeline(schedule="interleaved", virtual=2),
    "llama interleaved of 5 layers": pipeline(LLAMA, layers=5, schedule="interleaved", virtual=2),
    "gpt zero-bubble": pipeline(schedule="zero-bubble"),
    "llama zero-bubble fast": pipeline(LLAMA, schedule="zero-bubble", exact=False),
}  # fmt: skip
IN_BF16 = {
    "gpt zero-bubble twice": pipeline(schedule="zero-bubble", virtual=2, compute=torch.bfloat16)
}
"""Of which the formula is 4.2 % above in fp32."""
SIZES = {
    "whole": dict.fromkeys(CASES, 1),
    "pipelines": dict.fromkeys(PIPELINES, 2),
    "in bf16": dict.fromkeys(IN_BF16, 2),
}


def find(name: str) -> dict[str, Any]:
    case = (CASES | PIPELINES | IN_BF16)[name]
    if name in CASES:
        believe_in(case.dp * case.layout.tp)
    passes.clear()
    peak, said = measured(case.config, case.layout, torch.device("cpu"))
    return {"peak": peak, "formula": said.total, "passes": passes}


passes: list[tuple[str, int, int]] = []
"""Kind, stage of this rank and leaf of each, of some steps."""


def note(owner: type, name: str, kind: str) -> None:
    """Have the passes that a method does noted."""
    inner = getattr(owner, name)

    def outer(stage: Any, leaf: int, *args: Any, **kwargs: Any) -> Any:
        halved = not kwargs.get("full_backward", True)
        if type(stage) is owner or kind != "backward":
            number = stage.stage_index // stage.group_size
            passes.append(("inputs" if halved else kind, number, leaf))
        return inner(stage, leaf, *args, **kwargs)

    setattr(owner, name, outer)


if __name__ == "__main__":
    note(LeanStage, "forward_one_chunk", "forward")
    note(LeanStage, "backward_one_chunk", "backward")
    note(Stage, "backward_one_chunk", "backward")
    note(Stage, "backward_weight_one_chunk", "weights")
    main(SIZES[sys.argv[2]], find)

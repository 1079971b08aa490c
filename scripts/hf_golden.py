"""What `transformers` makes of a few tiny models, kept so that tests run without it.

`pip install transformers` beside what the tests need; run as `python -m scripts.hf_golden`. Each folder
is as `save_pretrained` writes it, with tokens and the logits of them beside it.
"""

import shutil
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "tests" / "trainer" / "convert" / "golden"
POSITIONS, WORDS = 12, 40

_LLAMA = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt2": (
        "GPT2",
        {
            "vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS,
            "bos_token_id": 0, "eos_token_id": 0,
        },
        "5GB",
    ),
    "gpt2-untied": (
        "GPT2",
        {
            "vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": POSITIONS,
            "n_inner": 12, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
        },
        "5GB",
    ),
    "llama": ("Llama", _LLAMA | {"rope_theta": 500_000.0}, "6KB"),
    "llama-tied": ("Llama", _LLAMA | {"tie_word_embeddings": True, "head_dim": 6}, "5GB"),
    "llama-bias": ("Llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}, "5GB"),
    "qwen2": ("Qwen2", _LLAMA | {"rope_theta": 1e6, "tie_word_embeddings": True}, "5GB"),
}  # fmt: skip
"""By folder: transformers' class, its settings, the size of a file at most."""


def make(name: str) -> None:
    kind, settings, size = MODELS[name]
    transformers: Any = import_module("transformers")
    torch.manual_seed(len(name))
    if "rope_theta" in settings:  # transformers 5 takes it in here alone
        rope = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
        settings = settings | {"rope_parameters": rope}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(
        config
    )
    with torch.no_grad():
        for parameter in model.parameters():  # so that norms and biases are tried, too
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.eval()
    tokens = torch.randint(0, WORDS, (3, POSITIONS))
    with torch.no_grad():
        logits = model(tokens).logits
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    model.save_pretrained(FOLDER / name, max_shard_size=size)
    (FOLDER / name / "generation_config.json").unlink(missing_ok=True)
    save_file({"tokens": tokens, "logits": logits}, FOLDER / name / "expected.safetensors")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in MODELS:
        make(each)

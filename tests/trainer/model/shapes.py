"""The shapes of models that tests train: GPT-2's, Llama's, and what lies between."""

from dataclasses import replace

from elastic.trainer.model.config import GPTConfig

GPT2 = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=320)
LLAMA = GPTConfig(
    num_layers=4, hidden_size=32, num_attention_heads=4, num_query_groups=2, seq_length=16,
    vocab_size=320, ffn_hidden_size=48, position="rope", normalization="RMSNorm",
    activation="swiglu", bias=False, tied=False,
)  # fmt: skip
MIXED = GPTConfig(
    num_layers=1, hidden_size=32, num_attention_heads=2, kv_channels=8, seq_length=16,
    vocab_size=320, position="rope", rotary_percent=0.5, bias=False, qkv_bias=True,
)  # fmt: skip
DROPPED = replace(LLAMA, hidden_dropout=0.2, attention_dropout=0.3)
ALL = {"gpt2": GPT2, "llama": LLAMA, "mixed": MIXED, "dropped": DROPPED}

"""Floating-point operations of training, and how much of a device they use. Pure.

Three counts are in use. All take a multiplication by a weight as 6 operations a token (forward, and twice
that backward), none counts what recompute does again:

| count | weights | attention | who |
|---|---|---|---|
| `palm` | all N parameters, lookups too | all S x S scores: 12 L A D S | 6N + 12LHQT of PaLM's appendix B; ours, in `docs/benchmarks.md` |
| `matmul` | those that a token is multiplied with | the same | torchtitan |
| `megatron` | matrices only, no biases, no norms | the half that the causal mask leaves: 6 L A D S | Megatron-LM's `--log-throughput` |
"""

import re
from dataclasses import dataclass

from elastic.trainer.model.config import GPTConfig

PEAKS = {
    "V100": 125.0, "T4": 65.0,  # fp16: they have no bf16
    "A10": 125.0, "A30": 165.0, "A40": 149.7, "A100": 312.0, "A800": 312.0,
    "L4": 121.0, "L40S": 362.0,
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800": 989.0, "H20": 148.0,
    "H200": 989.0, "GH200": 989.0, "B200": 2250.0, "GB200": 2500.0,
}  # fmt: skip
"""Dense bf16 TFLOP/s by a word of the device's name, as the makers' data sheets have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """Of one token, forward and backward."""

    palm: float
    matmul: float
    megatron: float


def per_token(config: GPTConfig) -> Flops:
    """In sequences of `config.seq_length` tokens."""
    seq, hidden, words = config.seq_length, config.hidden_size, config.vocab_size
    inner = config.num_attention_heads * config.head_width
    scores = 12 * config.num_layers * inner * seq
    looked_up = seq * hidden * (config.position == "learned")
    looked_up += 0 if config.tied else words * hidden  # a tied table is the head, too
    mlp = hidden * config.mlp_width * (3 if config.activation == "swiglu" else 2)
    block = hidden * config.qkv_width + inner * hidden + mlp
    return Flops(
        palm=6 * config.parameter_count + scores,
        matmul=6 * (config.parameter_count - looked_up) + scores,
        megatron=6 * (config.num_layers * block + hidden * words) + scores / 2,
    )


def peak(device_name: str) -> float | None:
    """Dense bf16 operations a second of a device; None where its name says nothing to us."""
    fitting = [word for word in PEAKS if re.search(rf"\b{word}\b", device_name, re.IGNORECASE)]
    return PEAKS[max(fitting, key=len)] * 1e12 if fitting else None


def utilization(
    per_token: float, tokens: int, seconds: float, devices: int, peak: float | None
) -> float | None:
    """MFU, 0 to 1: what `tokens` of all devices took of the operations that these can do in `seconds`."""
    return None if peak is None else per_token * tokens / (seconds * devices * peak)

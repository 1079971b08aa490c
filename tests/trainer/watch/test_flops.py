import pytest

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.watch import flops

GPT_125M = GPTConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024, vocab_size=50304
)
GPT_1B3 = GPTConfig(
    num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50304
)
LLAMA_8B = GPTConfig(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
    ffn_hidden_size=14336, seq_length=8192, vocab_size=128256, position="rope",
    normalization="RMSNorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip


@pytest.mark.parametrize(("config", "wanted"), [(GPT_125M, 0.860e9), (GPT_1B3, 9.10e9)])
def test_palm_is_what_published_numbers_reckon_with(config: GPTConfig, wanted: float) -> None:
    assert flops.per_token(config).palm == pytest.approx(wanted, rel=1e-3)


def test_matmul_leaves_out_what_is_looked_up() -> None:
    """By hand: 8,030,261,248 parameters, of which the input table has 128,256 x 4,096."""
    assert LLAMA_8B.parameter_count == 8_030_261_248
    wanted = 6 * (8_030_261_248 - 128_256 * 4096) + 12 * 32 * 4096 * 8192
    assert flops.per_token(LLAMA_8B).matmul == wanted
    learned = 6 * 1024 * 768
    counts = flops.per_token(GPT_125M)
    assert counts.palm - counts.matmul == learned, "a tied table is the head"


def test_megatron_counts_what_its_log_throughput_counts() -> None:
    """By its formula of MHA: 72 B s L h^2 (1 + s / 6h + V / 12hL), with the half of the mask s / 12h."""
    layers, hidden, seq, words = 12, 768, 1024, 50304
    closed = 72 * layers * hidden**2 * (1 + seq / (12 * hidden) + words / (12 * hidden * layers))
    assert flops.per_token(GPT_125M).megatron == pytest.approx(closed, rel=1e-12)
    query, key = 32 * 128, 8 * 128
    attention = 4096 * (query + 2 * key) + query * 8192 + query * 4096
    grouped = 6 * (32 * (attention + 3 * 4096 * 14336) + 4096 * 128256)
    assert flops.per_token(LLAMA_8B).megatron == pytest.approx(grouped, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA GH200 480GB", 989), ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121), ("Intel(R) Xeon(R)", None),
    ],
)  # fmt: skip
def test_peaks_by_name(name: str, tera: float | None) -> None:
    assert flops.peak(name) == (None if tera is None else tera * 1e12)


def test_utilization_is_of_all_devices() -> None:
    """The baseline's 494k tokens/s of one device at 2048 tokens are 48.8 % of it."""
    config = GPTConfig(
        num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=2048, vocab_size=50304
    )
    count = flops.per_token(config).palm
    assert flops.utilization(count, 494_000, 1.0, 1, 989e12) == pytest.approx(0.488, abs=3e-3)
    assert flops.utilization(count, 4 * 494_000, 2.0, 2, 989e12) == pytest.approx(0.488, abs=3e-3)
    assert flops.utilization(count, 494_000, 1.0, 1, None) is None

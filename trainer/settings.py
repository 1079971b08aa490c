"""What a training run is told, under Megatron's names; the one reader of its flags."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.proto.errors import UsageError
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.optimizer import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One training run. The defaults are a demonstration for two CPU cores."""

    data_dir: Path
    """Tokenizer and token file; made from Python's standard library where missing."""
    save: Path
    """Checkpoints; a run goes on from the newest one in it."""
    steps: int = 400
    """Optimizer steps in all, those before a resume included."""
    save_interval: int = 20
    """Steps between checkpoints on storage; every step is saved in memory, the last on storage too."""
    log_interval: int = 20
    """Steps between lines of progress."""
    global_batch_size: int = 24
    """Samples of one step over all ranks; any world size will do."""
    seq_length: int = 64
    """Tokens of one sample."""
    num_layers: int = 2
    """Blocks."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_attention_heads: int = 4
    """Heads of each attention."""
    vocab_size: int = 2048
    """Tokens that the tokenizer learns at most."""
    corpus_bytes: int = 4_000_000
    """Bytes of text that are trained on at most."""
    lr: float = 3e-3
    """Peak learning rate."""
    min_lr: float = 3e-4
    """Last learning rate."""
    lr_warmup_iters: int = 50
    """Steps of linear warm-up."""
    lr_decay_iters: int | None = None
    """Step at which `min_lr` is reached; None: at the last step."""
    weight_decay: float = 0.1
    """AdamW's decay of matrices, a step and learning rate."""
    adam_beta1: float = 0.9
    """AdamW's average of gradients."""
    adam_beta2: float = 0.95
    """AdamW's average of their squares."""
    clip_grad: float = 1.0
    """Largest norm of the whole gradient."""
    init_method_std: float = 0.04
    """Deviation of the first weights; Megatron's 0.02 learns slower at a width this small."""
    seed: int = 1234
    """Decides the first weights and the order of samples."""

    def __post_init__(self) -> None:
        for name in ("steps", "save_interval", "log_interval", "global_batch_size", "corpus_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be between 0 and 2^32 - 1, not {self.seed}")
        _ = self.schedule, self.model(self.vocab_size)  # they check the rest

    @property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return Schedule(
            lr=self.lr,
            min_lr=self.min_lr,
            warmup_steps=self.lr_warmup_iters,
            decay_steps=self.steps if self.lr_decay_iters is None else self.lr_decay_iters,
        )

    def model(self, vocab_size: int) -> GPTConfig:
        """The model for a tokenizer of `vocab_size` tokens, which may be fewer than asked for."""
        return GPTConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            seq_length=self.seq_length,
            vocab_size=vocab_size,
        )


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the command line; a mistake in it ends the process with one line and status 2."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        return Settings(**given)
    except (ValueError, UsageError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastic.trainer.pretrain_gpt",
        description="Train a GPT on the source of Python's standard library.",
        argument_default=argparse.SUPPRESS,  # defaults live in Settings, once
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data-dir", type=Path, required=True, help="tokenizer and tokens, made if missing")
    add("--save", type=Path, required=True, help="checkpoints; resumes from the newest")
    add("--steps", "--train-iters", type=int, help="optimizer steps in all")
    add("--save-interval", type=int, help="steps between checkpoints on storage")
    add("--log-interval", type=int, help="steps between lines of progress")
    add("--global-batch-size", type=int, help="samples of a step over all ranks")
    add("--seq-length", type=int, help="tokens of a sample")
    add("--num-layers", type=int, help="blocks")
    add("--hidden-size", type=int, help="width of the residual stream")
    add("--num-attention-heads", type=int, help="heads of each attention")
    add("--vocab-size", type=int, help="tokens that the tokenizer learns at most")
    add("--corpus-bytes", type=int, help="bytes of text that are trained on at most")
    add("--lr", type=float, help="peak learning rate")
    add("--min-lr", type=float, help="last learning rate")
    add("--lr-warmup-iters", type=int, help="steps of linear warm-up")
    add("--lr-decay-iters", type=int, help="step at which --min-lr is reached (the last)")
    add("--weight-decay", type=float, help="AdamW's decay of matrices")
    add("--adam-beta1", type=float, help="AdamW's average of gradients")
    add("--adam-beta2", type=float, help="AdamW's average of their squares")
    add("--clip-grad", type=float, help="largest norm of the whole gradient")
    add("--init-method-std", type=float, help="deviation of the first weights")
    add("--seed", type=int, help="decides first weights and order of samples")
    return parser

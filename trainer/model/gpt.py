"""GPT, or the part of one that a pipeline's stage has.

Shapes: B samples, S positions (s of them on this rank under sequence parallelism), H hidden size, V words.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.layers import Block, Norm
from elastic.trainer.model.loss import cross_entropy
from elastic.trainer.parallel.tensor import TensorParallel, VocabEmbedding, local


class Embedding(nn.Module):
    """Tokens to the residual stream: [B, S] int64 -> [B, s, H]."""

    def __init__(self, config: GPTConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.words = VocabEmbedding(config.vocab_size, config.hidden_size, tp)
        learned = nn.Parameter(torch.empty(config.seq_length, config.hidden_size))
        self.positions = tp.stored(learned, Replicate()) if config.position == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        if self.positions is None:
            return hidden  # type: ignore[no-any-return]
        return hidden + self.tp.mine(self.tp.on_stream(self.positions)[: tokens.shape[1]])  # type: ignore[no-any-return]


class Head(nn.Module):
    """The last norm, and the words' scores, which nobody holds at once."""

    def __init__(self, config: GPTConfig, tp: TensorParallel, words: nn.Parameter | None) -> None:
        super().__init__()
        self.tp = tp
        self.norm = Norm(config, tp)
        own = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.weight = tp.stored(own, Shard(0)) if words is None else words

    def forward(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """[B, s, H], [B, S] int64, [B, S] -> the weighted sum of cross entropies in nats, and each
        token's own [B, S], which has no gradient."""
        entered = self.tp.enter(self.norm(hidden)).flatten(0, 1)
        loss, losses = cross_entropy(
            entered, local(self.weight), targets.flatten(), weights.flatten(), self.tp
        )
        return loss, losses.view(targets.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, s, H] -> this rank's words [B, S, v]."""
        return nn.functional.linear(self.tp.enter(self.norm(hidden)), local(self.weight))


class GPT(nn.Module):
    """All of the model, or blocks `layers` of it with the ends that are there.

    Names are those of the whole model, whoever has which part. Weights are unset until
    `initialize` (init.py) or a checkpoint.
    """

    def __init__(
        self, config: GPTConfig, tp: TensorParallel | None = None, layers: range | None = None
    ) -> None:
        super().__init__()
        tp = tp or TensorParallel()
        layers = range(config.num_layers) if layers is None else layers
        self.config, self.layers = config, layers
        self.embedding = Embedding(config, tp) if layers.start == 0 else None
        self.blocks = nn.ModuleDict({str(number): Block(config, tp) for number in layers})
        last = layers.stop == config.num_layers
        words = self.embedding.words.weight if self.embedding and config.tied else None
        self.head = Head(config, tp, words) if last else None

    def stream(self, inputs: Tensor) -> Tensor:
        """Tokens [B, S] where this part has the embedding, else the residual stream [B, s, H], through
        the blocks: [B, s, H]."""
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        for block in self.blocks.values():
            hidden = block(hidden)
        return hidden

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each position: [B, S] int64 -> [B, S, V]. Of a whole model."""
        assert self.head is not None
        return self.head.logits(self.stream(tokens))

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The residual stream; with the head, its two losses of `targets`, each [B, S]."""
        hidden = self.stream(inputs)
        if self.head is None:
            return hidden
        assert targets is not None
        assert weights is not None
        return self.head(hidden, targets, weights)  # type: ignore[no-any-return]

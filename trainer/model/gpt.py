"""GPT, or the part of one that a pipeline's stage has.

Shapes: B samples, S positions (s of them on this rank under sequence parallelism), H hidden size, V words.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from elastic.proto.errors import UsageError
from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.dropout import Dropout
from elastic.trainer.model.layers import Block, Norm
from elastic.trainer.model.loss import Chunk, compiled_chunk, cross_entropy
from elastic.trainer.model.recompute import Recompute, through
from elastic.trainer.model.tensor_parallel import TensorParallel, VocabEmbedding, local


class Embedding(nn.Module):
    """Tokens, and their positions, to the residual stream: each [B, S] int64 -> [B, s, H]."""

    def __init__(self, config: GPTConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.words = VocabEmbedding(config.vocab_size, config.hidden_size, tp)
        learned = nn.Parameter(torch.empty(config.positions, config.hidden_size))
        self.positions = tp.stored(learned, Replicate()) if config.position == "learned" else None
        self.dropout = Dropout(config.hidden_dropout, 0, tp.part)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, key: Tensor | None = None
    ) -> Tensor:
        return self.dropout(self.places(self.words(tokens), position_ids), key)  # type: ignore[no-any-return]

    def places(self, hidden: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.positions is None:
            return hidden
        learned = self.tp.on_stream(self.positions)
        if position_ids is None:
            length = hidden.shape[1] * (self.tp.size if self.tp.sequence else 1)
            return hidden + self.tp.mine(learned[:length])
        return hidden + nn.functional.embedding(self.tp.mine(position_ids, dim=1), learned)


class Head(nn.Module):
    """The last norm, and the words' scores, which nobody holds at once."""

    def __init__(self, config: GPTConfig, tp: TensorParallel, words: nn.Parameter | None) -> None:
        super().__init__()
        self.tp = tp
        self.norm = Norm(config, tp)
        own = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.weight = tp.stored(own, Shard(0)) if words is None else words
        self._chunk: Chunk | None = None

    def compile_loss(self) -> None:
        """A chunk of the loss becomes one kernel or two, where it is a dozen."""
        self._chunk = compiled_chunk()

    def forward(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """[B, s, H], [B, S] int64, [B, S] -> each token's cross entropy in nats [B, S], whose gradient
        is to be a multiple of `weights`."""
        entered = self.tp.enter(self.norm(hidden)).flatten(0, 1)
        losses = cross_entropy(
            entered, local(self.weight), labels.flatten(), weights.flatten(), self.tp, self._chunk
        )
        return losses.view(labels.shape)

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
        self._input: Tensor | None = None
        self._expected: Tensor | float = 1.0
        self._mask: Tensor | None = None
        self._keys: Sequence[Tensor | None] = [None] * (1 + config.num_layers)
        self._recompute = Recompute()

    def recompute(self, how: Recompute) -> None:
        """What backward computes again from now on."""
        self._recompute = how
        for block in self.blocks.values():
            cast(Block, block).attention.recomputed = how.granularity == "selective"

    def drop(self, keys: Tensor | None) -> None:
        """By which keys dropout draws in the next leaf, int64 [1 + L]; None: nothing is dropped."""
        self._keys = [None] * (1 + self.config.num_layers) if keys is None else keys.unbind()

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        """What the stage before this one made of the next leaf, [B, s, H]; where this part has the
        embedding it is not looked at."""
        self._input = hidden

    def expect(self, weight: Tensor | float, mask: Tensor | None = None) -> None:
        """By what the next leaf's losses, each times its mask, are multiplied in the end. Gradients are
        made with it, for the sake of fp16; any other is right, too. mask: where `forward` is given none."""
        self._expected, self._mask = weight, mask

    def stream(self, tokens: Tensor | None, position_ids: Tensor | None = None) -> Tensor:
        """The residual stream behind the blocks [B, s, H], from tokens [B, S] int64 where this part has
        the embedding."""
        if self.embedding is None:
            assert self._input is not None
            hidden = self._input
        else:
            hidden = self.embedding(tokens, position_ids, self._keys[0])
        return through(self.blocks, hidden, self._keys[1:], self._recompute)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token at each position: [B, S] int64 -> [B, S, V]. Of a whole model."""
        assert self.head is not None
        return self.head.logits(self.stream(tokens))

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: None = None,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        packed_seq_params: None = None,
    ) -> Tensor:
        """The residual stream [B, s, H]; of a part with the head, each token's cross entropy in nats
        [B, S] fp32, or without labels this rank's logits [B, S, v].

        input_ids, position_ids, labels: [B, S] int64; positions count from 0 where they are not given.
        Attention is causal. loss_mask: [B, S], by which losses are going to be multiplied; None: that
        which `expect` was told, or ones.
        """
        if attention_mask is not None:
            raise UsageError("attention is causal here: give no attention_mask")
        if packed_seq_params is not None:
            raise UsageError("samples are not packed here: give no packed_seq_params")
        hidden = self.stream(input_ids, position_ids)
        if self.head is None:
            return hidden
        if labels is None:
            return self.head.logits(hidden)
        if loss_mask is None:
            loss_mask = (
                torch.ones_like(labels, dtype=torch.float32) if self._mask is None else self._mask
            )
        return self.head(hidden, labels, loss_mask * self._expected)  # type: ignore[no-any-return]

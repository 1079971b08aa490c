"""A model that writes: it keeps the keys and values of what it has seen, so a token costs one position.

Shapes: B texts, S columns, T of them seen at most, H hidden size, V words; A heads, G of keys and values, D
their width. Texts of different lengths end in the same column: what is before one is hidden from it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic.trainer.model.gpt import GPT
from elastic.trainer.model.layers import Block


class Decoder:
    """Some texts that one model reads and goes on with."""

    def __init__(self, model: GPT, texts: Sequence[Sequence[int]], room: int) -> None:
        """texts: ids of tokens, at least one each; room: columns, at least the longest text's."""
        config, first = model.config, next(model.parameters())
        self._model = model
        self._device = first.device
        self._columns = 0
        """Seen."""
        longest = max(map(len, texts))
        self._starts = torch.tensor([longest - len(text) for text in texts], device=self._device)
        """The column of each text's first token, [B]."""
        shape = (config.num_layers, 2, len(texts), config.groups, room, config.head_width)
        self._kept = torch.empty(shape, dtype=first.dtype, device=self._device)
        """Keys and values, [L, 2, B, G, T, D]."""
        padded = [[text[0]] * (longest - len(text)) + list(text) for text in texts]
        self.scores = self._read(torch.tensor(padded, device=self._device))
        """Of what follows each text, [B, V]."""

    def read(self, tokens: Sequence[int]) -> None:
        """The next token of each text."""
        self.scores = self._read(torch.tensor(tokens, device=self._device).unsqueeze(1))

    @torch.no_grad()
    def _read(self, tokens: Tensor) -> Tensor:
        """[B, S] int64 -> [B, V]."""
        model, embedding, head = self._model, self._model.embedding, self._model.head
        assert embedding is not None
        assert head is not None
        before, self._columns = self._columns, self._columns + tokens.shape[1]
        columns = torch.arange(self._columns, device=self._device)
        asking = columns[before:]
        positions = (asking - self._starts.unsqueeze(1)).clamp(min=0)  # [B, S]
        seen = columns <= asking.unsqueeze(1)  # [S, T]
        own = columns >= self._starts.view(-1, 1, 1)
        # What no text has sees itself, since a softmax over nothing is NaN.
        mask = (seen & (own | (columns == asking.unsqueeze(1)))).unsqueeze(1)  # [B, 1, S, T]
        hidden = embedding(tokens, positions)
        for number, block in enumerate(model.blocks.values()):
            assert isinstance(block, Block)
            hidden = hidden + self._attended(number, block, hidden, positions, mask)
            hidden = hidden + block.mlp(block.mlp_norm(hidden))
        return head.logits(hidden[:, -1:])[:, 0]

    def _attended(
        self, number: int, block: Block, hidden: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """A block's attention, over what was seen before as well: [B, S, H] -> [B, S, H]."""
        attention = block.attention
        query, key, value = attention.parts(attention.qkv(block.attention_norm(hidden)), positions)
        new = slice(self._columns - key.shape[2], self._columns)
        keys, values = self._kept[number]
        keys[:, :, new], values[:, :, new] = key, value
        mixed = F.scaled_dot_product_attention(
            query, keys[:, :, : self._columns], values[:, :, : self._columns], attn_mask=mask,
            enable_gqa=attention.queries > 1,
        )  # fmt: skip
        return attention.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

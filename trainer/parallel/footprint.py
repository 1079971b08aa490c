"""Device memory that a step takes at its peak, as a formula of the model, the layout and the batch.

The peak is in the last leaf, where its forward ends: the parameters, what leaves before have added to the
gradients, all that forward has kept, and what the loss, or the first block's backward, makes on top of it.

Shapes as in `layers.py`; b samples of a leaf, s positions of the residual stream on this rank.
"""

from dataclasses import dataclass

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.loss import tokens_of_chunk
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.parallel.pipeline import cut

_FP32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes on one device, at the peak of a step."""

    parameters: int
    """As they are kept, and as they are computed with."""
    optimizer: int
    gradients: int
    activations: int
    """What forward keeps of all leaves that are under way."""
    working: int
    """What the loss or the backward of a block has on top of it."""

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.activations + self.working


def footprint(
    config: GPTConfig, layout: Layout, grid: Grid, place: Place, *, leaf_size: int, leaves: int
) -> Footprint:
    """Of the rank at `place`; leaf_size: samples of a leaf; leaves: of this replica in a step."""
    return _Rank(config, layout, grid, place, leaf_size, leaves).footprint()


class _Rank:
    def __init__(
        self,
        config: GPTConfig,
        layout: Layout,
        grid: Grid,
        place: Place,
        leaf_size: int,
        leaves: int,
    ) -> None:
        self.config, self.layout, self.grid, self.place = config, layout, grid, place
        self.leaf_size, self.leaves = leaf_size, leaves
        stages = layout.pp * layout.virtual
        mine = range(place.pp, stages, layout.pp)
        self.stages = stages
        self.blocks = sum(len(cut(config.num_layers, stages)[number]) for number in mine)
        self.first, self.last = place.pp == 0, mine[-1] == stages - 1
        self.width = layout.compute.itemsize
        self.reduced = 8 if layout.exact else _FP32

    def footprint(self) -> Footprint:
        layout = self.layout
        count = self.blocks * self._block() + self._ends()
        shard = count if layout.zero == 0 else count // self.grid.dp
        whole = count if layout.zero < 3 else self._ends() + 2 * self._block()
        kept = 0 if layout.offload == "all" else shard
        moments = 0 if layout.offload != "none" else shard
        gradients, leaf, most = self._gradients(count, shard), self._kept(), self._under_way()
        if self.leaves <= most:  # no backward has begun then, and fewer leaves are there afterwards
            gradients, most = max(
                (0, most), (gradients, most - 1), key=lambda m: m[0] + leaf * m[1]
            )
        return Footprint(
            parameters=_FP32 * kept + self.width * whole,
            optimizer=2 * _FP32 * moments,
            gradients=gradients,
            activations=round(leaf * most),
            working=max(self._loss(), self._backward()),
        )

    # --- parameters ------------------------------------------------------------------------------

    def _block(self) -> int:
        """Elements of a block on this rank."""
        config, tp = self.config, self.layout.tp
        hidden, mixed = config.hidden_size, config.num_attention_heads * config.head_width
        into_mlp = 2 if config.activation == "swiglu" else 1
        matrices = hidden * (config.qkv_width + mixed + (into_mlp + 1) * config.mlp_width) // tp
        norms = 2 * hidden * (2 if config.normalization == "LayerNorm" else 1)
        biases = 0
        if config.bias:
            biases = (config.qkv_width + into_mlp * config.mlp_width) // tp + 2 * hidden
        return matrices + norms + biases

    def _ends(self) -> int:
        """Elements of what this rank has around the blocks."""
        config = self.config
        words = config.vocab_size * config.hidden_size // self.layout.tp
        own_head = not config.tied or self.layout.pp > 1
        ends = 0
        if self.first:
            learned = config.positions if config.position == "learned" else 0
            ends += words + learned * config.hidden_size
        if self.last:
            ends += 2 * config.hidden_size + (words if own_head else 0)
        return ends

    def _gradients(self, count: int, shard: int) -> int:
        """Bytes once a leaf's backward has been."""
        if self.layout.zero < 2:
            return self.reduced * count
        own = 0 if self.layout.offload == "all" else _FP32 * shard
        return own + (self.reduced * shard if self.layout.exact else 0)

    # --- what a leaf keeps -----------------------------------------------------------------------

    def _stream(self) -> int:
        """Bytes of the residual stream at one place: [b, s, H]."""
        positions = self.config.seq_length // (self.layout.tp if self.layout.sequence else 1)
        return self.leaf_size * positions * self.config.hidden_size * self.width

    def _tokens(self) -> int:
        return self.leaf_size * self.config.seq_length

    def _of_block(self) -> int:
        """Bytes that backward of a block needs of its forward."""
        config, tp = self.config, self.layout.tp
        mixed = config.num_attention_heads * config.head_width
        compiled, gated = self.layout.compile, config.activation == "swiglu"
        in_mlp = (3 if compiled else 4) if gated else 2
        each = 2 * config.hidden_size + (config.qkv_width + mixed + in_mlp * config.mlp_width) // tp
        turned = config.position == "rope" and self.layout.recompute.granularity != "selective"
        if turned and not compiled:  # queries and keys, beside what they were
            each += (config.qkv_width - config.groups * config.head_width) // tp
        softmax = _FP32 * config.num_attention_heads // tp
        kept = 2 * self._stream() + self._tokens() * (self.width * each + softmax)
        if config.hidden_dropout:
            kept += 2 * self._stream() // self.width  # a byte each: what stays
        if config.attention_dropout and self.layout.recompute.granularity != "selective":
            kept += self._scores() * (_FP32 + 1 + (0 if compiled else self.width))
        return kept

    def _scores(self) -> int:
        """Elements of them, where attention has dropout: [b, a, S, S]."""
        heads = self.config.num_attention_heads // self.layout.tp
        return self._tokens() * self.config.seq_length * heads

    def _kept(self) -> int:
        """Bytes that forward of a leaf keeps on this rank, by all its blocks."""
        recompute = self.layout.recompute
        kept = 0
        for group, again in recompute.groups(self.blocks):
            kept += self._stream() if again else len(group) * self._of_block()
        return kept

    def _under_way(self) -> float:
        """Leaves whose forward is done and whose backward is not, at most."""
        layout, place = self.layout, self.place
        if layout.pp == 1 or layout.schedule == "gpipe":
            return 1 if layout.pp == 1 else self.leaves
        if layout.schedule == "1f1b":
            return min(self.leaves, layout.pp - place.pp)
        ahead = 2 * (layout.pp - place.pp - 1) + (layout.virtual - 1) * layout.pp + 1
        return min(self.leaves * layout.virtual, ahead) / layout.virtual

    # --- what comes on top -----------------------------------------------------------------------

    def _loss(self) -> int:
        """Bytes while a chunk's logits are there."""
        if not self.last:
            return 0
        config = self.config
        words = config.vocab_size // self.layout.tp
        head = words * config.hidden_size
        entered = self._tokens() * config.hidden_size * self.width
        chunk = min(tokens_of_chunk(words), self._tokens()) * words
        each = 2 * self.width if self.layout.compile else 4 * _FP32
        return self._stream() + 2 * entered + _FP32 * head + each * chunk

    def _backward(self) -> int:
        """Bytes that a block's backward has at most, and what it has computed again."""
        config = self.config
        again = max((len(g) for g, a in self.layout.recompute.groups(self.blocks) if a), default=0)
        mlp = 2 * config.mlp_width // self.layout.tp + config.hidden_size
        working = self._tokens() * mlp * self.width + self._stream() + self.width * self._block()
        if self.layout.zero > 1:
            working += self.reduced * self._block()
        return again * self._of_block() + working

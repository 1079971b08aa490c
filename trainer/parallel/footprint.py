"""Device memory that a step takes at its peak, as a formula of the model, the layout and the batch.

The passes of a step are gone through in their order (`order.py`): each finds the parameters, what passes before
have added to the gradients, all that forward has kept and backward has not used, and makes something of its own on
top of it. Then comes the gradient's norm, with nothing but parameters, moments and the gradient beside it. What
finds and makes the most is the peak.

Shapes as in `layers.py`; b samples of a leaf, s positions of the residual stream on this rank.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.trainer.model.config import GPTConfig
from elastic.trainer.model.loss import tokens_of_chunk
from elastic.trainer.parallel.grid import Grid, Place
from elastic.trainer.parallel.layout import Layout
from elastic.trainer.parallel.order import order
from elastic.trainer.parallel.pipeline import cut
from elastic.trainer.parallel.zero_bubble import LOSS_IN_ONE

_FP32 = 4
_SQUARED = 2**24
"""Elements whose squares are summed up at once, as `gradients.py` has it."""


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
    """What the loss, the backward of a block or the gradient's norm has on top of it."""

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.activations + self.working


def footprint(
    config: GPTConfig,
    layout: Layout,
    grid: Grid,
    place: Place,
    *,
    leaf_size: int,
    leaves: int,
    keeps_sent: bool = False,
) -> Footprint:
    """Of the rank at `place`; leaf_size: samples of a leaf; leaves: of this replica in a step; keeps_sent:
    whether what a rank has sent stays until the step ends, as it does with Gloo where stages interleave."""
    return _Rank(config, layout, grid, place, leaf_size, leaves, keeps_sent).footprint()


def kept_by_block(
    config: GPTConfig, layout: Layout, grid: Grid, place: Place, *, leaf_size: int
) -> int:
    """Bytes that a block's forward of a leaf keeps for backward."""
    return _Rank(config, layout, grid, place, leaf_size, 1, False).kept(1)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One of a rank's, and what each of its leaves takes in bytes."""

    blocks: int
    first: bool
    last: bool
    elements: int
    """Of its parameters on this rank."""
    kept: int = 0
    """From forward until backward."""
    loss: int = 0
    """While forward has the logits of a chunk."""
    backward: int = 0
    """While backward of a block works."""
    held: int = 0
    """From the pass for what came in to that for the weights, beside what forward kept."""


@dataclass(frozen=True, slots=True)
class _Moment:
    """What there is at a time, beside parameters and moments."""

    gradients: int
    activations: int
    working: int
    gathered: int
    """Of parameters, as they are computed with."""

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.working + self.gathered


class _Rank:
    def __init__(
        self,
        config: GPTConfig,
        layout: Layout,
        grid: Grid,
        place: Place,
        leaf_size: int,
        leaves: int,
        keeps_sent: bool,
    ) -> None:
        self.config, self.layout, self.grid, self.place = config, layout, grid, place
        self.leaf_size, self.leaves = leaf_size, leaves
        self.width = layout.compute.itemsize
        self.reduced = 8 if layout.exact else _FP32
        self.stages = [
            self._stage(number) for number in range(place.pp, layout.pp * layout.virtual, layout.pp)
        ]
        waits = layout.schedule in ("gpipe", "1f1b")  # and lets go of it
        self.sent = self._stream() if keeps_sent and not waits else 0

    def footprint(self) -> Footprint:
        layout = self.layout
        count = sum(stage.elements for stage in self.stages)
        shard = self._shard(count)
        whole = count if layout.zero < 3 else self._outside() + 2 * self._block()
        moments = 0 if layout.offload != "none" else shard
        own = 0 if layout.offload == "all" else _FP32 * shard
        norm = _Moment(own, 0, self._norm(), 0)
        peak = max(*self._moments(self.width * whole), norm, key=lambda moment: moment.total)
        return Footprint(
            parameters=own + peak.gathered,
            optimizer=2 * _FP32 * moments,
            gradients=peak.gradients,
            activations=peak.activations,
            working=peak.working,
        )

    def _moments(self, gathered: int) -> Iterator[_Moment]:
        """The largest of each pass of a step: where it begins or ends."""
        layout = self.layout
        schedule = layout.schedule if layout.pp > 1 else "1f1b"
        kept, begun = 0, [False] * len(self.stages)
        for one in order(
            schedule, rank=self.place.pp, pp=layout.pp, virtual=layout.virtual, leaves=self.leaves
        ):
            stage, added = self.stages[one.stage], self._added(begun)
            if one.kind == "forward":
                kept += stage.kept
                left = self._left() if any(begun) else 0
                yield _Moment(added, kept, stage.loss + left, gathered)
                continue
            if one.kind == "inputs":
                kept += stage.held
            yield _Moment(added, kept, stage.backward, gathered)
            if one.kind != "weights" and not stage.first:
                kept += self.sent
            if one.kind != "inputs":
                kept -= stage.kept + (stage.held if one.kind == "weights" else 0)
                kept += (
                    0 if stage.last else self.sent
                )  # what came out, so far a part of what is kept
                begun[one.stage] = True
                yield _Moment(self._added(begun), kept, stage.backward, gathered)

    def _stage(self, number: int) -> _Stage:
        """By its number in the pipeline."""
        stages = self.layout.pp * self.layout.virtual
        blocks = len(cut(self.config.num_layers, stages)[number])
        first, last = number == 0, number == stages - 1
        return _Stage(
            blocks, first, last,
            elements=blocks * self._block() + self._ends(first=first, last=last),
            kept=self.kept(blocks) + (self._of_loss() if last else self._stream()),
            loss=self._loss() if last else 0,
            backward=self._backward(blocks),
            held=self._held(blocks, first=first, last=last),
        )  # fmt: skip

    # --- parameters ------------------------------------------------------------------------------

    def _matrices(self) -> list[int]:
        """Elements of each matrix of a block on this rank."""
        config = self.config
        mixed = config.num_attention_heads * config.head_width
        of_mlp = [config.mlp_width] * (3 if config.activation == "swiglu" else 2)
        widths = [config.qkv_width, mixed, *of_mlp]
        return [config.hidden_size * width // self.layout.tp for width in widths]

    def _block(self) -> int:
        """Elements of a block on this rank."""
        config, hidden = self.config, self.config.hidden_size
        norms = 2 * hidden * (2 if config.normalization == "LayerNorm" else 1)
        biases = 0
        if config.bias:
            into_mlp = 2 if config.activation == "swiglu" else 1
            biases = (config.qkv_width + into_mlp * config.mlp_width) // self.layout.tp + 2 * hidden
        return sum(self._matrices()) + norms + biases

    def _ends(self, *, first: bool, last: bool) -> int:
        """Elements of what a stage has around the blocks."""
        config = self.config
        words = config.vocab_size * config.hidden_size // self.layout.tp
        own_head = not config.tied or self.layout.pp > 1
        ends = 0
        if first:
            learned = config.positions if config.position == "learned" else 0
            ends += words + learned * config.hidden_size
        if last:
            ends += 2 * config.hidden_size + (words if own_head else 0)
        return ends

    def _shard(self, count: int) -> int:
        """Elements of so many that are this replica's to keep."""
        return count if self.layout.zero == 0 else count // self.grid.dp

    def _outside(self) -> int:
        """Elements of this rank that are in no block."""
        return sum(stage.elements - stage.blocks * self._block() for stage in self.stages)

    def _added(self, begun: list[bool]) -> int:
        """Bytes of gradients where some stages had a leaf's backward."""
        layout = self.layout
        count = sum(
            stage.elements for stage, there in zip(self.stages, begun, strict=True) if there
        )
        if layout.zero < 2:
            return self.reduced * count
        shard = self._shard(count)
        own = 0 if layout.offload == "all" else _FP32 * shard
        return own + (self.reduced * shard if layout.exact else 0)

    def _norm(self) -> int:
        """Bytes while the squares of gradients of one size are summed up: the gradients, and unless they are
        compiled four times fp64 of them."""
        words = self.config.vocab_size * self.config.hidden_size // self.layout.tp
        sizes = self._matrices() * sum(stage.blocks for stage in self.stages)
        sizes += [words] * (self._outside() // words)
        alike = Counter(map(self._shard, sizes))
        most = max(size * min(count, max(1, _SQUARED // size)) for size, count in alike.items())
        return (_FP32 + (0 if self.layout.compile else 4 * 8)) * most

    def _left(self) -> int:
        """Bytes that FSDP holds of one leaf's backward until the next one's: what it reduced last, which is of
        the parameters around the blocks."""
        return self.reduced * self._outside() if self.layout.zero > 1 else 0

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

    def kept(self, blocks: int) -> int:
        """Bytes that forward of a leaf keeps of a stage's blocks."""
        kept = 0
        for group, again in self.layout.recompute.groups(blocks):
            kept += self._stream() if again else len(group) * self._of_block()
        return kept

    def _of_loss(self) -> int:
        """Bytes that forward of a leaf keeps of the last norm and the loss: what came in, two gradients."""
        words = self.config.vocab_size // self.layout.tp
        entered = self._tokens() + words
        return self._stream() + self.width * entered * self.config.hidden_size

    def _held(self, blocks: int, *, first: bool, last: bool) -> int:
        """Bytes of the gradients of what each weight made, until the weights' own are computed of them."""
        if last and LOSS_IN_ONE:
            return -self.kept(blocks) - self._of_loss()
        if first:  # computes all at once, later
            return self._stream()
        config = self.config
        into_mlp = 2 if config.activation == "swiglu" else 1
        made = (config.qkv_width + into_mlp * config.mlp_width) // self.layout.tp
        return blocks * (4 * self._stream() + self._tokens() * made * self.width)

    # --- what comes on top -----------------------------------------------------------------------

    def _loss(self) -> int:
        """Bytes while a chunk's logits are there, beside what is kept of it."""
        config = self.config
        words = config.vocab_size // self.layout.tp
        head = words * config.hidden_size
        entered = self._tokens() * config.hidden_size * self.width
        chunk = min(tokens_of_chunk(words), self._tokens())
        if (
            self.layout.compile
        ):  # slopes are where logits were, and those of the chunk before are there still
            held = self.width * (chunk + min(chunk, self._tokens() - chunk)) * words
        else:
            held = 4 * _FP32 * chunk * words
        return entered + (_FP32 - self.width) * head + held

    def _backward(self, blocks: int) -> int:
        """Bytes that a block's backward has at most, and what it has computed again."""
        config = self.config
        again = max((len(g) for g, a in self.layout.recompute.groups(blocks) if a), default=0)
        into_mlp = 2 if config.activation == "swiglu" else 1
        mlp = into_mlp * config.mlp_width // self.layout.tp + config.hidden_size
        working = self._tokens() * mlp * self.width + self._stream() + self.width * self._block()
        if self.layout.zero > 1:
            working += self.reduced * self._block()
            if self.layout.sequence and self.layout.exact:  # made as wide first
                working += (self.reduced - self.width) * self._block()
        return again * self._of_block() + working

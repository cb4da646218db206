"""Bytes that a rank holds: parameters, gradient, optimizer state, and activations.

Of Ψ elements that live on a rank (whole parameters, as far as other places cut them) it steps Ψᵣ:
Ψ/N on N shard ranks, more or less where that does not divide or a tensor has an owner. With AdamW,
weights that live in 16 bits beside float32 masters, and gradients summed in float32, that is

    stage         0      1              2              3
    float32       16Ψ    8Ψ + 8Ψᵣ       4Ψ + 12Ψᵣ      16Ψᵣ
    16 bits       16Ψ    6Ψ + 12Ψᵣ      2Ψ + 16Ψᵣ      16Ψᵣ

`keep` adds the gathered weights, 4Ψ or 2Ψ. Rajbhandari et al. 2020, figure 1, have gradients in 16
bits, so 4Ψ + 12Ψᵣ and 2Ψ + 14Ψᵣ for stages 1 and 2. A frozen parameter has its weights only.

Activations are the arrays that wait for the backward when a forward ends, of one micro-batch. Of a
layer of GPT with F = 4h, in fp16, with dropout, on t tensor-parallel ranks, they are

    s·b·h·(10 + 24/t)      10: two norms' outputs 4, two inputs of cut linears 4, two masks 2
    s·b·h·(4 + 30/t)       with sequence parallelism, where norms and masks are cut too

and a few numbers a token. Korthikanti et al. 2022 (`korthikanti`) have 5·a·s/(h·t) more in the
bracket, for attention weights, which our attention computes again from the log-sum-exp of a row;
and with sequence parallelism 34/t, because they gather the inputs of cut linears again in the
backward, at (t-1)/t·s·b·h elements more to send for each of them, where we keep them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from minitrain.cut import cut_size
from minitrain.layout import Layout, LayoutError
from minitrain.nn.config import TABLE, Config, GPTConfig
from minitrain.parallel.placement import Placement, Shape
from minitrain.parallel.table import Placements, placements

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
INDEX = 8  # of an id or a position
SLOTS = {"adamw": 2, "sgd": 1}  # arrays that an optimizer keeps for each parameter


class Held(NamedTuple):
    """Bytes that a rank holds."""

    parameters: int
    gradient: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def held(
    config: Config,
    layout: Layout,
    *,
    batch: int,
    length: int,
    rank: int = 0,
    dtype: str = "float32",
    recompute: str = "none",
    optimizer: str = "adamw",
    frozen: Collection[str] = (),
) -> Held:
    """What a rank holds when the forward of a micro-batch ends.

    Args:
        batch, length: sequences of the micro-batch on this data rank, and tokens of each.
        rank: in the layout; where sizes do not divide, the first ranks along an axis hold more.
        dtype: of weights and activations; with halves what is stepped is float32.
        recompute: "none", "selective" (the same, see parallelize) or "full".
        optimizer: "adamw" or "sgd", with momentum.
        frozen: patterns of the names of parameters that are not trained. Activations are counted
            as if they were: some of what only their gradients read is not kept.

    Raises:
        LayoutError: axes that this formula does not cover, or a mixture of experts, whose
            activations depend on what tokens choose.
    """
    others = [axis for axis in ("pp", "cp", "ep") if getattr(layout, axis) > 1]
    if others:
        raise LayoutError(f"the memory formula covers dp, shard and tp, not {', '.join(others)}")
    if config.mixture is not None:
        raise LayoutError("the memory formula covers dense models, not a mixture's activations")
    table, at = placements(config, layout, frozen=frozen), layout.coordinates(rank)
    item, wide = BYTES[dtype], max(4, BYTES[dtype])
    waiting = _Waiting(config, layout, table, at, batch, length, item, wide)
    states = held_between_steps(config, layout, rank=rank, dtype=dtype, optimizer=optimizer,
                                frozen=frozen)  # fmt: skip
    return states._replace(activations=waiting.bytes(recompute))


def held_between_steps(
    config: Config,
    layout: Layout,
    *,
    rank: int = 0,
    dtype: str = "float32",
    optimizer: str = "adamw",
    frozen: Collection[str] = (),
) -> Held:
    """What a rank holds of any model, on any layout, before the first activation; see `held`."""
    table, at = placements(config, layout, frozen=frozen), layout.coordinates(rank)
    item, wide = BYTES[dtype], max(4, BYTES[dtype])
    steps = sum(_size(e.shape, e.state, at) for e in table.values()) * wide
    return Held(
        _weights(layout, table, at, item, wide),
        _gradient(layout, table, at, wide),
        SLOTS[optimizer] * steps,
        activations=0,
    )


def _weights(layout: Layout, table: Placements, at: Mapping[str, int], item: int, wide: int) -> int:
    """Weights that live, masters beside them, and what is kept of a gather."""
    lives = sum(_size(e.shape, e.placement, at) for e in table.values())
    if layout.zero in (1, 2) and item < wide:
        return lives * item + sum(_size(e.shape, e.state, at) for e in table.values()) * wide
    gathered = sum(_size(e.shape, e.unsharded, at) for e in table.values()) if layout.keep else 0
    return lives * wide + gathered * item


def _gradient(layout: Layout, table: Placements, at: Mapping[str, int], wide: int) -> int:
    """Of all that lives; from stage 2 on, of what is stepped."""
    trained = [e for e in table.values() if e.state is not None]
    cut = layout.zero in (2, 3)
    return sum(_size(e.shape, e.state if cut else e.placement, at) for e in trained) * wide


def _size(shape: Shape, placement: Placement | None, at: Mapping[str, int]) -> int:
    """How many elements of a parameter a rank has; none where there is no place for it."""
    piece = None if placement is None else placement.piece(shape, at)
    return 0 if piece is None else piece.size


class _Waiting:
    """Activations that wait for the backward on a rank.

    Tokens are b·s of them; between the regions a rank has its own positions of them (all without
    sequence parallelism). An element has `item` bytes, a number of a statistic `wide`. How many
    heads, features and ids are the rank's, its pieces of the first block and of the table say.
    """

    def __init__(self, config: Config, layout: Layout, table: Placements, at: Mapping[str, int],
                 batch: int, length: int, item: int, wide: int):  # fmt: skip
        self.gpt = isinstance(config, GPTConfig)
        self.layers, self.width, self.item, self.wide = config.layers, config.width, item, wide
        self.dropout = isinstance(config, GPTConfig) and config.dropout > 0
        self.features = config.width // config.heads
        block, attention = "blocks.0", "blocks.0.attention"

        def own(name: str, axis: int) -> int:
            piece = table[name].unsharded.piece(table[name].shape, at)
            assert piece is not None
            return piece.shape[axis]

        self.vocab = own(TABLE, 0)
        self.heads = own(f"{attention}.out.weight", 0)
        self.kv_heads = self.heads if self.gpt else own(f"{attention}.kv.weight", 2)
        self.hidden = own(f"{block}.mlp.down.weight", 0)
        self.length, self.tokens, self.cut = length, batch * length, layout.tp > 1
        self.own = batch * (cut_size(length, at["tp"], layout.tp) if layout.sp else length)
        self.stream = config.width * item  # bytes of a token between the blocks

    def bytes(self, recompute: str) -> int:
        """All, with blocks as they are or with blocks of which the input is kept."""
        full = recompute == "full"
        block = self.own * self.stream if full else self._block()
        tables = 0 if full or self.gpt else self._rotary_tables()
        return self._embedding() + self.layers * block + tables + self._head() + self._loss()

    def _block(self) -> int:
        inputs = 2 * self.tokens * self.stream
        heads = 2 * self.heads + 2 * self.kv_heads  # queries, keys, values, and what comes out
        attention = self.tokens * (heads * self.features * self.item + self.heads * self.wide)
        # GELU's input and output; of SwiGLU the input is twice as wide.
        mlp = self.tokens * self.hidden * self.item * (2 if self.gpt else 3)
        return 2 * (self._norm() + self._mask()) + inputs + attention + mlp + self._dropped_heads()

    def _norm(self) -> int:
        """Its normalised output (or input, of an RMS norm), and a number a token."""
        return self.own * (self.stream + self.wide)

    def _mask(self) -> int:
        """Of a dropout: a byte an element."""
        return self.own * self.width if self.dropout else 0

    def _dropped_heads(self) -> int:
        """Which heads' attention weights dropout looks at."""
        return self.heads * INDEX if self.dropout else 0

    def _embedding(self) -> int:
        """Of a cut table, which row each token takes, and whether it is this rank's."""
        return (self.tokens * (INDEX + 1) if self.cut else 0) + self._mask()

    def _rotary_tables(self) -> int:
        """Sine and cosine for half the features of a head, the same ones in every layer."""
        return self.length * self.features // 2 * 2 * self.wide

    def _head(self) -> int:
        return self._norm() + self.tokens * self.stream

    def _loss(self) -> int:
        """Logits; of a token its label, two flags and its log-sum-exp."""
        return self.tokens * (self.vocab * self.item + INDEX + 2 + self.wide)


def korthikanti(config: Config, t: int, *, batch: int, length: int, sp: bool,
                recompute: str = "none") -> float:  # fmt: skip
    """Bytes of a layer's activations in fp16 by Korthikanti et al. 2022, table 2.

    For F = 4h and dropout everywhere. "selective" leaves out attention weights, "full" all but the
    input.
    """
    sbh = length * batch * config.width
    if recompute == "full":
        return 2 * sbh / (t if sp else 1)
    weights = 5 * config.heads * length / config.width if recompute == "none" else 0
    return sbh * ((34 / t if sp else 10 + 24 / t) + weights / t)

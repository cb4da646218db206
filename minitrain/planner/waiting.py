"""Activations that a rank of our own runs holds.

They are the arrays that wait for the backward when a forward ends: of one micro-batch, or in
a pipeline of as many as the schedule has in flight at most, with what came in to each chunk and
what went out. Where the backward is in two parts, a micro-batch counts until the second has ended;
the first frees some of it, so there the figure is an upper bound. Of a layer of GPT with F = 4h, in
fp16, with dropout, on t tensor-parallel ranks, they are

    s·b·h·(10 + 24/t)      10: two norms' outputs 4, two inputs of cut linears 4, two masks 2
    s·b·h·(4 + 30/t)       with sequence parallelism, where norms and masks are cut too

and a few numbers a token. Korthikanti et al. 2022 (`activation_bytes`) have 5·a·s/(h·t) more in the
bracket, for attention weights, which our attention computes again from the log-sum-exp of a row;
and with sequence parallelism 34/t, because they gather the inputs of cut linears again in the
backward, at (t-1)/t·s·b·h elements more to send for each of them, where we keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minitrain.cut import cut_size
from minitrain.layout import Layout
from minitrain.nn.config import TABLE, Config, GPTConfig
from minitrain.parallel.positions import exchanged_heads, own_positions, piece_positions
from minitrain.parallel.table import Placements
from minitrain.schedules.instruction import BACKWARD_INPUTS, FORWARD, Schedule

INDEX = 8  # of an id or a position


class Waiting:
    """Activations that wait for the backward on a rank.

    Tokens are b·s/c of them; between the regions a rank has its own positions of them (all without
    sequence parallelism). An element has `item` bytes, a number of a statistic `wide`. How many
    heads, features and ids are the rank's, its pieces of the first block and of the table say.
    """

    def __init__(self, config: Config, layout: Layout, table: Placements, at: Mapping[str, int],
                 batch: int, length: int, item: int, wide: int):  # fmt: skip
        self.gpt = isinstance(config, GPTConfig)
        self.stage = at["pp"]
        self.layers, self.width, self.item, self.wide = config.layers, config.width, item, wide
        self.dropout = isinstance(config, GPTConfig) and config.dropout > 0
        self.features = config.width // config.heads
        block, attention = "blocks.0", "blocks.0.attention"

        def own(name: str, axis: int) -> int:
            piece = table[name].unsharded.without("pp").piece(table[name].shape, at)
            assert piece is not None
            return piece.shape[axis]

        self.vocab = own(TABLE, 0)
        self.heads = own(f"{attention}.out.weight", 0)
        self.kv_heads = self.heads if self.gpt else own(f"{attention}.kv.weight", 2)
        self.hidden = own(f"{block}.mlp.down.weight", 0)
        self.layout, self.at, self.batch, self.whole = layout, at, batch, length
        self.length = length = len(own_positions(layout, length, at["cp"]))
        self.tokens, self.cut = batch * length, layout.tp > 1
        self.own = batch * (cut_size(length, at["tp"], layout.tp) if layout.sp else length)
        self.stream = config.width * item  # bytes of a token between the blocks

    def most(self, schedule: Schedule, links: list[list[range]], recompute: str) -> int:
        """The most bytes that wait in a step.

        Args:
            links: for each rank of the pipeline, the links of each of its chunks.
        """
        own = links[self.stage]
        chunks = [
            self._chunk(stage, chunk, schedule.route.ranks, recompute)
            for stage, chunk in zip(schedule.route.of_rank[self.stage], own, strict=True)
        ]
        held = peak = 0
        for kind, _, chunk in schedule.instructions(self.stage):
            if kind == FORWARD:
                peak = max(peak, held := held + chunks[chunk])
            elif kind != BACKWARD_INPUTS:  # after it, its weights' half still waits
                held -= chunks[chunk]
        blocks = any(0 < link <= self.layers for chunk in own for link in chunk)
        if recompute == "full" or not blocks:
            return peak
        # What all layers share: rotary tables, and which positions the ranks have.
        turns = 0 if self.gpt else self._rotary_tables()
        return peak + turns + (self.whole * INDEX if self.layout.cp > 1 else 0)

    def _chunk(self, stage: int, links: range, ranks: Sequence[int], recompute: str) -> int:
        """Of one micro-batch in a virtual stage: its links, what came in, what went out."""
        size = sum(self._link(link, recompute) for link in links)
        if links.start > 0:
            # What comes from this very rank is what the chunk before it gave.
            came = ranks[stage - 1] != self.stage
            keeps = not self.gpt or (recompute == "full" and links.start <= self.layers)
            size += (came - (keeps and len(links) > 0)) * self.own * self.stream
        if links and links.stop <= self.layers + 1:  # an empty stage hands on what came
            size += self.own * self.stream
        return size

    def _link(self, link: int, recompute: str) -> int:
        """A block as it is, or one of which the input is kept; or an end of the chain."""
        if link == 0:
            return self._embedding()
        if link > self.layers:
            return self._head() + self._loss()
        return self.own * self.stream if recompute == "full" else self._block()

    def _block(self) -> int:
        inputs = 2 * self.tokens * self.stream
        # GELU's input and output; of SwiGLU the input is twice as wide.
        mlp = self.tokens * self.hidden * self.item * (2 if self.gpt else 3)
        return 2 * (self._norm() + self._mask()) + inputs + self._attention() + mlp

    def _attention(self) -> int:
        """Queries, keys, values, what comes out, and a number for each row; the next linear's
        input is what comes out, unless that was rounded or exchanged since."""
        layout, wide = self.layout, self.wide
        heads, kv_heads, tokens = self.heads, self.kv_heads, self.tokens
        if layout.cp == 1 or layout.cp_kind == "gather":
            kept, out = heads + 2 * kv_heads, tokens * self._features(heads, self.item)
            if layout.cp > 1:  # all ranks' keys and values; the own ones where packed with queries
                whole = self.batch * self.whole * self._features(2 * kv_heads, self.item)
                kept, out = 3 * heads if self.gpt else heads, out + whole
        else:
            heads, kv_heads, tokens, shared = self._exchanged()
            kept, out = heads + 2 * kv_heads, tokens * self._features(heads, wide) + shared
            if layout.exchange > 1 or self.item < wide:
                out += self.tokens * self._features(self.heads, self.item)
        kept = tokens * self._features(kept, self.item)
        return kept + out + tokens * heads * wide + (heads * INDEX if self.dropout else 0)

    def _exchanged(self) -> tuple[int, int, int, int]:
        """Query heads, key/value heads and tokens of a rank of a ring; and bytes to say which of
        the key/value heads these are."""
        count, place = self.layout.exchange, self.at["cp"]
        piece = len(piece_positions(self.layout, self.whole, place // count))
        kv_heads = None if self.gpt else self.kv_heads
        queries, keys, shared = exchanged_heads(self.heads, kv_heads, ranks=count)
        inner = place % count
        return queries[inner], keys[inner], self.batch * piece, len(shared) * INDEX

    def _features(self, heads: int, item: int) -> int:
        """Bytes of a token's features of so many heads."""
        return heads * self.features * item

    def _norm(self) -> int:
        """Its normalised output (or input, of an RMS norm), and a number a token."""
        return self.own * (self.stream + self.wide)

    def _mask(self) -> int:
        """Of a dropout: a byte an element."""
        return self.own * self.width if self.dropout else 0

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

"""Bytes that a rank holds: parameters, gradient, optimizer state, and activations.

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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from minitrain.cut import cut_size
from minitrain.layout import Layout, LayoutError

BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
INDEX = 8  # of an id or a position
SLOTS = {"adamw": 2, "sgd": 1}  # arrays that an optimizer keeps for each parameter


@dataclass(frozen=True)
class Model:
    """The sizes that memory depends on; the names are those of nn's configurations.

    Attributes:
        family: "gpt" or "llama".
        dropout: whether any dropout rate is above 0.
    """

    family: str
    vocab: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    tied: bool
    dropout: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Model:
        """From a model's configuration as plain data (nn.families.to_values)."""
        width, gpt = values["width"], values["family"] == "gpt"
        return cls(
            kv_heads=values.get("kv_heads") or values["heads"],
            hidden=values["hidden"] or (4 * width if gpt else 8 * math.ceil(width / 3)),
            dropout=bool(values.get("dropout")),
            **{name: values[name] for name in (
                "family", "vocab", "context", "layers", "heads", "width", "tied")},
        )  # fmt: skip


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
    model: Model,
    layout: Layout,
    *,
    batch: int,
    length: int,
    rank: int = 0,
    dtype: str = "float32",
    recompute: str = "none",
    optimizer: str = "adamw",
) -> Held:
    """What a tensor-parallel rank holds when the forward of a micro-batch ends.

    Args:
        batch, length: sequences of the micro-batch on this data rank, and tokens of each.
        rank: the coordinate along tp; where sizes do not divide, the first ranks hold more.
        dtype: of weights and activations; with halves the weights are float32.
        recompute: "none", "selective" (the same, see parallelize) or "full".
        optimizer: "adamw" or "sgd", with momentum.

    Raises:
        LayoutError: axes that this formula does not cover.
    """
    others = [axis for axis in ("pp", "shard", "cp", "ep") if getattr(layout, axis) > 1]
    if others:
        raise LayoutError(f"the memory formula covers dp and tp, not {', '.join(others)}")
    part = _Part(model, layout, rank)
    wide = max(4, BYTES[dtype])
    own = part.parameters() * wide
    waiting = _Waiting(part, batch, length, BYTES[dtype], wide, layout.sp, rank)
    return Held(own, own, SLOTS[optimizer] * own, waiting.bytes(recompute))


class _Part:
    """How much of a model a tensor-parallel rank has."""

    def __init__(self, model: Model, layout: Layout, rank: int):
        self.model, self.tp = model, layout.tp
        self.features = model.width // model.heads
        self.hidden, self.vocab = (cut_size(n, rank, self.tp) for n in (model.hidden, model.vocab))
        self.heads, self.kv_heads = self._heads(rank)

    def _heads(self, rank: int) -> tuple[int, int]:
        """Query and key/value heads; key/value heads fewer than ranks have several holders each."""
        kv, group = self.model.kv_heads, self.model.heads // self.model.kv_heads
        if kv >= self.tp:
            own = cut_size(kv, rank, self.tp)
            return own * group, own
        for head in range(kv):
            sharers = cut_size(self.tp, head, kv)
            if rank < sharers:
                return cut_size(group, rank, sharers), 1
            rank -= sharers
        raise ValueError(f"there is no rank {rank} beyond the {self.tp} of tp")

    def parameters(self) -> int:
        """Elements of all parameters that the rank has a part of."""
        model = self.model
        table = self.vocab * model.width
        outside = table if model.tied else 2 * table
        gains = 2 * model.width if model.family == "gpt" else model.width  # of a norm; its shifts
        if model.family == "gpt":
            outside += model.context * model.width
        return outside + gains + model.layers * (2 * gains + self._attention() + self._mlp())

    def _attention(self) -> int:
        c, d = self.model.width, self.features
        weights = (2 * self.heads + 2 * self.kv_heads) * d * c
        biases = 3 * self.heads * d + c
        return weights + (biases if self.model.family == "gpt" else 0)

    def _mlp(self) -> int:
        c, f = self.model.width, self.hidden
        return 2 * c * f + f + c if self.model.family == "gpt" else 3 * c * f


class _Waiting:
    """Activations that wait for the backward on a rank.

    Tokens are b·s of them; between the regions a rank has its own positions of them (all without
    sequence parallelism). An element has `item` bytes, a number of a statistic `wide`.
    """

    def __init__(self, part: _Part, batch: int, length: int, item: int, wide: int, sp: bool,
                 rank: int):  # fmt: skip
        self.part, self.model, self.item, self.wide = part, part.model, item, wide
        self.batch, self.length, self.tokens = batch, length, batch * length
        self.own = batch * (cut_size(length, rank, part.tp) if sp else length)
        self.stream = self.model.width * item  # bytes of a token between the blocks

    def bytes(self, recompute: str) -> int:
        """All, with blocks as they are or with blocks of which the input is kept."""
        full = recompute == "full"
        block = self.own * self.stream if full else self._block()
        tables = 0 if full or self.model.family == "gpt" else self._rotary_tables()
        return self._embedding() + self.model.layers * block + tables + self._head() + self._loss()

    def _block(self) -> int:
        gpt = self.model.family == "gpt"
        part, inputs = self.part, 2 * self.tokens * self.stream
        heads = 2 * part.heads + 2 * part.kv_heads  # queries, keys, values, and what comes out
        attention = self.tokens * (heads * part.features * self.item + part.heads * self.wide)
        # GELU's input and output; of SwiGLU the input is twice as wide.
        mlp = self.tokens * part.hidden * self.item * (2 if gpt else 3)
        return 2 * (self._norm() + self._mask()) + inputs + attention + mlp + self._dropped_heads()

    def _norm(self) -> int:
        """Its normalised output (or input, of an RMS norm), and a number a token."""
        return self.own * (self.stream + self.wide)

    def _mask(self) -> int:
        """Of a dropout: a byte an element."""
        return self.own * self.model.width if self.model.dropout else 0

    def _dropped_heads(self) -> int:
        """Which heads' attention weights dropout looks at."""
        return self.part.heads * INDEX if self.model.dropout else 0

    def _embedding(self) -> int:
        """Which row each token takes, and whether it is this rank's."""
        return self.tokens * (INDEX + 1) + self._mask()

    def _rotary_tables(self) -> int:
        """Sine and cosine for half the features of a head, the same ones in every layer."""
        return self.length * self.part.features // 2 * 2 * self.wide

    def _head(self) -> int:
        return self._norm() + self.tokens * self.stream

    def _loss(self) -> int:
        """Logits; of a token its label, two flags and its log-sum-exp; and the sum of losses."""
        logits = self.tokens * self.part.vocab * self.item
        return logits + self.tokens * (INDEX + 2 + self.wide) + self.wide


def korthikanti(model: Model, t: int, *, batch: int, length: int, sp: bool,
                recompute: str = "none") -> float:  # fmt: skip
    """Bytes of a layer's activations in fp16 by Korthikanti et al. 2022, table 2.

    For F = 4h and dropout everywhere. "selective" leaves out attention weights, "full" all but the
    input.
    """
    sbh = length * batch * model.width
    if recompute == "full":
        return 2 * sbh / (t if sp else 1)
    weights = 5 * model.heads * length / model.width if recompute == "none" else 0
    return sbh * ((34 / t if sp else 10 + 24 / t) + weights / t)

"""Context parallelism: each rank has some positions of a sequence; only attention mixes them.

Sharded:     tokens, labels and every activation: positions, over the cp ranks
Replicated:  weights and optimizer state, and which positions each rank has
Forward:     ring, zigzag: c-1 hops of a piece's keys and values, 2·b·s/c·h_kv elements each;
             ulysses: two exchanges (queries, keys and values; output) of (c-1)/c of b·s/c·(2h +
             2h_kv); gather: all-gather of keys and values, (c-1)·2·b·s/c·h_kv
Backward:    ring, zigzag: the c-1 hops again, and c-1 of their gradients, which are summed in at
             least float32; ulysses: the same exchanges; gather: a reduce-scatter of as much; once a
             step an all-reduce of each gradient, with that of the data ranks
Equals serial because: all but attention treats each position by itself; and attention to all keys
             is that to one block of keys after the other, joined by their log-sum-exps.
Paper:       Liu et al. 2023, "Ring attention"; Brandon et al. 2023, "Striped attention" (balance);
             Jacobs et al. 2023, "DeepSpeed Ulysses"; Fang and Zhao 2024, "USP" (both together)

Positions are global indices: rotary angles, masks and dropout follow them, and labels are made
before a sequence is cut. A block of keys that no query sees is passed on, but costs no arithmetic
(tiles.py). What the ranks have is in positions.py; a piece may be empty.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from minitrain.array import Array, from_host, namespace
from minitrain.autograd import functional as F
from minitrain.autograd.tensor import Tensor
from minitrain.autograd.tile import Rule
from minitrain.comm.group import Group
from minitrain.cut import cut_sizes
from minitrain.layout import Layout
from minitrain.nn import AttentionCore, Module, current
from minitrain.parallel import regions
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.positions import exchanged_heads, piece_positions
from minitrain.parallel.ring import RingAttention

POSITIONS, HEADS = 1, -2  # axes of queries, keys and values


@lru_cache(maxsize=8)  # every layer asks for the same
def _pieces(layout: Layout, length: int) -> tuple[Array, ...]:
    """The positions of each piece of the ring."""
    places = [piece_positions(layout, length, i) for i in range(layout.ring)]
    return tuple([np.array(place, np.int64) for place in places])  # of nothing, it would be floats


_whole = lru_cache(maxsize=8)(np.arange)


def _length() -> int:
    """How long the whole sequences are; what a rank has of one does not tell."""
    view = current()
    if view is None or view.length is None:
        raise ValueError(
            "context parallelism needs a window that has the whole sequences' length: "
            "nn.Window(seed, step, samples, positions, length=...)"
        )
    return view.length


class RingCore(Module):
    """Attention whose keys and values go round."""

    def __init__(self, core: AttentionCore, ring: Group, layout: Layout):
        self.core, self.ring, self.layout = core, ring, layout

    def forward(self, *packed: Tensor, positions: Array, first: int = 0) -> Tensor:
        """As AttentionCore's; the queries and keys are those of this rank's positions."""
        heads, width = packed[0].shape[-2:]
        drop = self.core.weight_dropout(heads, first)
        rule = Rule(positions, positions, causal=True, scale=width**-0.5, dropout=drop)
        pieces = _pieces(self.layout, _length())
        return RingAttention.apply(*packed, rule=rule, ring=self.ring, pieces=pieces)


class GatherCore(Module):
    """Attention to keys and values that are gathered, and kept for the backward."""

    def __init__(self, core: AttentionCore, group: Group):
        self.core, self.group = core, group

    def forward(self, *packed: Tensor, positions: Array) -> Tensor:
        """As AttentionCore's; the queries and keys are those of this rank's positions."""
        q, kv = packed if len(packed) == 2 else (packed[0][:, :, 0], packed[0][:, :, 1:])
        sizes = cut_sizes(_length(), self.group.size)
        kv = regions.all_gather(kv, self.group, POSITIONS, sizes)
        drop = self.core.weight_dropout(q.shape[HEADS])
        whole = _whole(_length())
        return F.attention(q, kv, positions=positions, key_positions=whole, dropout=drop)


class UlyssesCore(Module):
    """Attention of some heads at all the positions that a group has, between two exchanges.

    Args:
        core: attention at these positions, on a ring of such groups.
    """

    def __init__(self, core: RingCore, group: Group, layout: Layout):
        self.core, self.group, self.layout = core, group, layout

    def forward(self, *packed: Tensor, positions: Array) -> Tensor:
        """As AttentionCore's; the queries and keys are those of this rank's positions.

        Heads need not divide; a key/value head goes to each rank that has queries of it.
        """
        piece, group = _pieces(self.layout, _length())[self.core.ring.rank], self.group
        along = POSITIONS, cut_sizes(len(piece), group.size)
        sizes = [x.shape[HEADS] for x in packed]
        heads, kv_heads, shared = exchanged_heads(*sizes, ranks=group.size)
        *queries, last = packed
        if shared:
            last = last[:, :, :, from_host(np.array(shared), namespace(last.array))]
        whole = [regions.all_to_all(x, group, along, (x.ndim + HEADS, cut))
                 for x, cut in zip((*queries, last), (heads, kv_heads), strict=False)]  # fmt: skip
        out = self.core(*whole, positions=piece, first=sum(heads[: group.rank]))
        return regions.all_to_all(out, group, (out.ndim + HEADS, heads), along)


def cut_context(model: Any, mesh: Mesh) -> None:
    """Let every attention of a model see the positions of all cp ranks."""
    layout, at = mesh.layout, mesh.coordinates["cp"]
    inner = at % layout.exchange
    exchange = mesh.along({"cp": tuple(range(at - inner, at - inner + layout.exchange))})
    ring = mesh.along({"cp": tuple(range(inner, layout.cp, layout.exchange))})
    for path, core in list(model.modules()):
        if isinstance(core, AttentionCore):
            on_ring = RingCore(core, ring, layout)
            if layout.cp_kind == "gather":
                model.replace(path, GatherCore(core, ring))
            elif layout.exchange > 1:
                model.replace(path, UlyssesCore(on_ring, exchange, layout))
            else:
                model.replace(path, on_ring)

"""Attention: softmax(Q·Kᵀ·scale)·V without ever holding all the weights.

`attention_reference.py` says what is computed, in ten lines; `tiles.py` computes it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.array import Array, check_integers, namespace
from minitrain.autograd.blocks import check_seal, seal
from minitrain.autograd.dropout import WeightDropout
from minitrain.autograd.function import Function, Grads, Needs
from minitrain.autograd.tensor import Tensor
from minitrain.autograd.tile import Rule
from minitrain.autograd.tiles import block_backward, block_forward, row_delta


class Attention(Function):
    """See `attention`. Inputs: q, k, v apart; or q and kv; or qkv, packed along axis 2."""

    def forward(self, *packed: Array, rule: Rule) -> Array:
        self.packed, self.rule = packed, rule
        self.sealed = seal(rule.q_positions, rule.k_positions)
        out, self.lse = block_forward(*unpack(packed), rule)
        self.out = out.astype(packed[0].dtype, copy=False)
        return self.out

    def vjp(self, grad_out: Array, needs: Needs) -> Grads:
        rule, dtype = self.rule, self.lse.dtype
        check_seal("attention's positions", self.sealed, rule.q_positions, rule.k_positions)
        delta = row_delta(self.out, grad_out) if self.out.dtype == dtype else None
        grads = tuple([namespace(x).zeros(x.shape, dtype) for x in self.packed])
        q, k, v = unpack(self.packed)
        block_backward(grad_out, q, k, v, rule, lse=self.lse, delta=delta, grads=unpack(grads))
        return tuple(
            [g.astype(x.dtype, copy=False) for g, x in zip(grads, self.packed, strict=True)]
        )


def unpack(packed: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    """q (B, T, H, D), k and v (B, S, K, D) as views of arrays that pack them along axis 2."""
    if len(packed) == 3:
        return packed
    if len(packed) == 2:
        return packed[0], packed[1][:, :, 0], packed[1][:, :, 1]
    return packed[0][:, :, 0], packed[0][:, :, 1], packed[0][:, :, 2]


def _checked(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Queries and keys, refused if their shapes and that of the values do not go together."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or q.shape[::3] != k.shape[::3]:
        raise ValueError(
            f"attention: queries {q.shape}, keys {k.shape} and values {v.shape} must be "
            "(B, T, H, D), (B, S, K, D) and (B, S, K, D)"
        )
    if q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads evenly"
        )
    return q, k


def attention(*packed: Tensor, positions: Any = None, key_positions: Any = None,
              causal: bool = True, scale: float | None = None,
              dropout: WeightDropout | None = None) -> Tensor:  # fmt: skip
    """softmax(Q·Kᵀ·scale)·V, where a query sees the keys at its own position and before.

    Args:
        packed: q, k, v; or q, kv; or qkv.
        positions: (T,) integers, the queries' positions; 0, 1, ... if left out.
        key_positions: (S,) integers; the same as positions if left out.
        scale: 1/√D if left out.

    A query that sees no key gets zeros, and no gradient flows through it.

    Shapes: q (B, T, H, D), k and v (B, S, K, D), or kv (B, S, 2, K, D), or qkv (B, T, 3, H, D)
        -> (B, T, H, D). H must be a multiple of K.
    """
    q, k = _checked(*unpack(tuple([x.array for x in packed])))
    q_positions = np.arange(q.shape[1]) if positions is None else np.asarray(positions)
    if key_positions is None:
        key_positions = q_positions if q.shape[1] == k.shape[1] else np.arange(k.shape[1])
    key_positions = check_integers("key_positions", np.asarray(key_positions))
    check_integers("positions", q_positions)
    if (len(q_positions), len(key_positions)) != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"{q.shape[1]} queries and {k.shape[1]} keys, but {len(q_positions)} and "
            f"{len(key_positions)} positions"
        )
    rule = Rule(
        q_positions,
        key_positions,
        causal,
        float(max(1, q.shape[3]) ** -0.5 if scale is None else scale),
        dropout,
    )
    return Attention.apply(*packed, rule=rule)
